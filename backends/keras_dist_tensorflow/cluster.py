"""Start of TensorFlow's runtime for several workers."""

import contextlib
import ctypes
import re
import signal
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_dist.core.options import CommunicationOptions
from keras_dist.core.plan import Cluster
from keras_dist.errors import ClusterError
from keras_dist.errors import WorkerLostError
from keras_dist_tensorflow import runtime_internals
from keras_dist_tensorflow.addresses import check_addresses
from keras_dist_tensorflow.listening import listen_to_own_address

# Default seconds that workers wait for one another when they start.
JOINING = 300.0
# Seconds without a heartbeat after which a worker counts as lost; options with
# a shorter timeout make them fewer.
SILENCE = 30.0

_JOB = "worker"
_TASK = re.compile(r"/job:worker/(?:replica:\d+/)?task:(\d+)")


def task_name(index: int) -> str:
    """Returns TensorFlow's name of a worker."""
    return f"/job:{_JOB}/replica:0/task:{index}"


def tasks_in(text: str) -> list[int]:
    """Returns the indices of the workers that a message names, each once."""
    return list(dict.fromkeys(int(task) for task in _TASK.findall(text)))


def local_devices(kind: str) -> list[Any]:
    """Returns this worker's logical devices of a kind, such as `"CPU"`.

    TensorFlow lists those of all workers.
    """
    devices = tf.config.list_logical_devices(kind)
    own = runtime_internals.runtime_task()
    return [
        device
        for device in devices
        if tf.DeviceSpec.from_string(device.name).task in (None, own)
    ]


def start(cluster: Cluster, options: CommunicationOptions) -> None:
    """Starts this worker's server and waits for the other workers.

    Raises:
        ClusterError: If an address is taken or unknown.
        WorkerLostError: If not all workers came in time.
        RuntimeError: If TensorFlow has started already.
    """
    if runtime_internals.has_started():
        raise RuntimeError(
            "The workers of a cluster must be joined at program startup. "
            "TensorFlow has made a tensor or listed its devices already. "
            "Make the MultiWorkerMirroredStrategy before anything else, "
            "straight after the imports."
        )
    seconds = options.timeout_seconds or JOINING
    check_addresses(cluster, seconds)
    silence = min(SILENCE, options.timeout_seconds or SILENCE)
    runtime_internals.configure_runtime(
        job=_JOB,
        addresses=cluster.addresses,
        index=cluster.index,
        joining_ms=round(seconds * 1000),
        silence_ms=max(1000, round(silence * 1000)),
    )
    with interruptible(), reaction_kept(signal.SIGTERM):
        try:
            runtime_internals.start_runtime()
        except tf.errors.OpError as error:
            raise _explained(cluster, seconds, error) from error
    listen_to_own_address(cluster)


@contextlib.contextmanager
def reaction_kept(number: int) -> Iterator[None]:
    """Restores the handler of signal `number` at the end, native ones too.

    TensorFlow's coordination service catches SIGTERM for listeners to
    preemptions. There are none here, so a worker would survive the signal.
    """
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    # `struct sigaction` is smaller on every system. Python's `signal.signal`
    # works in the main thread alone and can't restore native handlers.
    before = ctypes.create_string_buffer(1024)
    if sigaction(number, None, before):
        raise OSError(ctypes.get_errno(), "sigaction")
    try:
        yield
    finally:
        sigaction(number, before, None)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Lets Ctrl-C end the process while TensorFlow waits in native code.

    TensorFlow holds the interpreter's lock while it waits for workers, so
    Python's own handler would not run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _explained(
    cluster: Cluster, seconds: float, error: tf.errors.OpError
) -> Exception:
    own = cluster.addresses[cluster.index]
    if "Could not start gRPC server" in error.message:
        return ClusterError(
            f"Worker {cluster.index} can't listen at its address '{own}': "
            f"{error.message}. Choose a free port, or end what uses it."
        )
    # TensorFlow lists missing workers after these words. Without a list the
    # chief is missing.
    _, _, listed = error.message.partition("timed out task names:")
    missing = tasks_in(listed.partition("Additional")[0]) or [0]
    names = ", ".join(
        f"worker {index} at {cluster.addresses[index]}" for index in missing
    )
    return WorkerLostError(
        f"Not all of the {cluster.num_workers} workers came within "
        f"{seconds:g} seconds: {names} did not. See what they printed, start "
        "all workers at about the same time, check that this machine reaches "
        "those addresses, or give `timeout_seconds` of "
        "`CommunicationOptions` more."
    )
