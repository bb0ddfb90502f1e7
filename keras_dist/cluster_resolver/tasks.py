"""The workers of a cluster that train together."""

import contextlib
import ipaddress
import socket

from keras_dist.cluster_resolver.base import ClusterResolver
from keras_dist.cluster_resolver.spec import ClusterSpec
from keras_dist.core.plan import Cluster
from keras_dist.errors import ClusterError
from keras_dist.joining.addresses import is_address
from keras_dist.joining.addresses import split

_TASK_TYPES = ("chief", "worker", "evaluator", "ps")
_SINGLE = ("chief", "evaluator")


def cluster_of(resolver: ClusterResolver | None) -> Cluster | None:
    """Returns the workers that train together, from a resolver.

    Args:
        resolver: `ClusterResolver`, one of TensorFlow's resolvers, or `None`.

    Returns:
        `Cluster` with the chief, if there is one, before the workers. `None`
        where this process works alone: without a resolver, with an empty
        cluster or one of a single worker, and for an evaluator.

    Raises:
        ClusterError: If the workers can't train together: if this process'
            task is unknown, if there is a parameter server, or if an address
            is missing or unreadable.

    Example:

    >>> from keras_dist.cluster_resolver import ClusterSpec
    >>> from keras_dist.cluster_resolver import SimpleClusterResolver
    >>> from keras_dist.cluster_resolver import cluster_of
    >>> spec = ClusterSpec({"chief": ["a:9000"], "worker": ["b:9000"]})
    >>> resolver = SimpleClusterResolver(spec, task_type="worker", task_id=0)
    >>> cluster = cluster_of(resolver)
    >>> cluster.index, cluster.addresses
    (1, ('a:9000', 'b:9000'))
    """
    if resolver is None:
        return None
    spec = ClusterSpec(resolver.cluster_spec() or {})
    if not spec:
        return None
    task_type, task_id = resolver.task_type, resolver.task_id
    _check_jobs(spec)
    number = _count(spec, "chief") + _count(spec, "worker")
    if task_type is None and number <= 1:
        return None
    if task_type is None or task_id is None:
        raise ClusterError(
            f"The cluster has {number} workers, but it is not known which of "
            f"them this process is.\nReceived: task_type={task_type!r} and "
            f"task_id={task_id!r} from {type(resolver).__name__}. Expected: a "
            "value for each. In TF_CONFIG, both are in 'task'."
        )
    _check_task(spec, task_type, task_id)
    if task_type == "evaluator":
        return None
    if _count(spec, "ps"):
        raise ClusterError(
            "Parameter servers are not used in training with collectives. "
            f"Received: {spec}. Leave out the job 'ps'."
        )
    if number <= 1:
        return None
    addresses = _addresses(spec)
    coordinator = getattr(resolver, "coordinator", None)
    if coordinator is not None:
        _check_address(coordinator, "The coordinator's address")
    before = _count(spec, "chief") if task_type == "worker" else 0
    return Cluster(
        index=before + task_id,
        leader=addresses[0],
        addresses=addresses,
        coordinator=coordinator,
        restarts=getattr(resolver, "restarts", 0),
        job=getattr(resolver, "job", ""),
    )


def _addresses(spec: ClusterSpec) -> tuple[str, ...]:
    """Returns the addresses of chief and workers, empty where unknown."""
    addresses: list[str] = []
    for job in ("chief", "worker"):
        if job not in spec.jobs:
            continue
        for index, address in enumerate(spec.job_tasks(job)):
            if address is None:
                raise ClusterError(
                    f"Task {index} of job {job!r} has no address. Received: "
                    f"{spec}. Expected: an address for each index."
                )
            if address or not addresses:
                _check_address(address, f"The address of {job} {index}")
            if address and address in addresses:
                raise ClusterError(
                    f"Two workers have the address {address!r}. Received: "
                    f"{spec}. Give each a host and port of its own."
                )
            addresses.append(address)
    return tuple(addresses)


def _check_address(address: str, what: str) -> None:
    if not is_address(address):
        raise ClusterError(
            f"{what} must be 'host:port', with a port of 1 to 65535. Received: "
            f"{address!r}."
        )
    if _is_unspecified(split(address)[0]):
        raise ClusterError(
            f"{what} must be one at which the other workers reach it. "
            f"Received: {address!r}, which stands for all addresses of a "
            "machine. Expected: the host's name or IP address; if all workers "
            "are on one machine, 127.0.0.1."
        )


def _is_unspecified(host: str) -> bool:
    """Tells whether a host is the address that stands for all of a machine."""
    with contextlib.suppress(OSError):
        return not any(socket.inet_aton(host))  # short forms, such as 0, too
    with contextlib.suppress(ValueError):
        ip = ipaddress.IPv6Address(host)
        return (ip.ipv4_mapped or ip).is_unspecified
    return False


def _check_task(spec: ClusterSpec, task_type: str, task_id: int) -> None:
    if task_type not in _TASK_TYPES:
        raise ClusterError(
            f"Unrecognized task_type: {task_type!r}. Expected one of: "
            f"{', '.join(_TASK_TYPES)}."
        )
    if task_type not in spec.jobs:
        # An evaluator need not be part of the cluster that it watches.
        if task_type == "evaluator":
            return
        raise ClusterError(
            f"`task_type` {task_type!r} not found in cluster_spec. Received: "
            f"{spec}."
        )
    if task_id < 0:
        raise ClusterError(
            "`task_id` must be an integer of at least 0. Received: "
            f"{task_id!r}."
        )
    if task_id >= spec.num_tasks(task_type):
        raise ClusterError(
            f"The `task_id` {task_id} exceeds the maximum id of {task_type}. "
            f"Expected: 0 to {spec.num_tasks(task_type) - 1}, as in {spec}."
        )


def _check_jobs(spec: ClusterSpec) -> None:
    strange = [job for job in spec.jobs if job not in _TASK_TYPES]
    if strange:
        raise ClusterError(
            f"Disallowed task type found in cluster spec: {strange[0]!r}. "
            f"Expected: {', '.join(_TASK_TYPES)}. Received: {spec}."
        )
    for job in _SINGLE:
        if _count(spec, job) > 1:
            raise ClusterError(
                f"There must be at most one {job!r}. Received: {spec}."
            )


def _count(spec: ClusterSpec, job: str) -> int:
    return spec.num_tasks(job) if job in spec.jobs else 0
