"""Lost workers, found from the errors of TensorFlow's collectives."""

import re

import tensorflow as tf

from keras_dist.core.plan import Cluster
from keras_dist.errors import WorkerLostError
from keras_dist_tensorflow import runtime_internals
from keras_dist_tensorflow.cluster import task_name
from keras_dist_tensorflow.cluster import tasks_in

# Milliseconds in which a living worker answers.
_ANSWER_MS = 3000
_KINDS = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
    tf.errors.FailedPreconditionError,
)
_OF_WORKERS = ("Collective", "CoordinationService", "remote target /job:")
_SAID = re.compile(r"Worker (\d+) at \S+ (?:ended|stopped)[^\n]*")
_SILENT = re.compile(r"stopped sending heartbeats\):\n((?:/job:.*\n?)+)")


def explained(
    error: BaseException, cluster: Cluster, timeout: float
) -> BaseException:
    """Implements `Workers.explain`; a collective may take `timeout` seconds."""
    if not isinstance(error, _KINDS) or not any(
        word in error.message for word in _OF_WORKERS
    ):
        return error
    return WorkerLostError(
        f"Worker {cluster.index} can't go on without the others: "
        f"{_reason(error.message, cluster, timeout)}. See what that worker "
        "printed, and start all workers again, for instance with `keras-dist "
        "run --max-restarts`."
    )


def _reason(message: str, cluster: Cluster, timeout: float) -> str:
    said = _SAID.search(message)
    if said:
        return said[0].rstrip(".")[0].lower() + said[0].rstrip(".")[1:]
    silent = _SILENT.search(message)
    found = tasks_in(silent[1]) if silent else []
    lost = _others(found, cluster)
    if lost:
        return f"{_names(lost, cluster)} gave no sign of life"
    if found:
        return "they count it as lost, because it gave no sign of life"
    lost = [
        index
        for index in _others(range(cluster.num_workers), cluster)
        if not runtime_internals.is_healthy(task_name(index), _ANSWER_MS)
    ]
    if lost:
        return f"{_names(lost, cluster)} can't be reached"
    # A worker named in the message may have ended and been restarted by now.
    lost = _others(tasks_in(message), cluster)
    if lost:
        return f"the connection to {_names(lost, cluster)} broke"
    return (
        "every worker is alive, but not all of them took part within "
        f"{timeout:g} seconds. They may run other code or other data, or "
        "one of them does something else for longer: then give "
        "`timeout_seconds` of `CommunicationOptions` more"
    )


def _others(indices: "list[int] | range", cluster: Cluster) -> list[int]:
    return [
        index
        for index in indices
        if index != cluster.index and index < cluster.num_workers
    ]


def _names(indices: list[int], cluster: Cluster) -> str:
    return ", ".join(
        f"worker {index} at {cluster.addresses[index]}" for index in indices
    )
