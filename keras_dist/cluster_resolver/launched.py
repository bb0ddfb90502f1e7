"""KerasDistClusterResolver: the workers of a `keras-dist run` job."""

from keras_dist.cluster_resolver.environment import WorkersResolver
from keras_dist.cluster_resolver.environment import integer
from keras_dist.cluster_resolver.environment import required
from keras_dist.errors import ClusterError

WORKERS = "KERAS_DIST_WORKERS"
INDEX = "KERAS_DIST_WORKER_INDEX"
COORDINATOR = "KERAS_DIST_COORDINATOR"
RESTARTS = "KERAS_DIST_RESTARTS"
_SET_BY = (
    "`keras-dist run`; where you start workers yourself, set "
    f"{WORKERS}=host:port,host:port and {INDEX}=0, 1, ..."
)


class KerasDistClusterResolver(WorkersResolver):
    """A resolver for workers that `keras-dist run` started.

    The environment variable `KERAS_DIST_WORKERS` has all workers' addresses,
    separated by commas and chief first; `KERAS_DIST_WORKER_INDEX` is this
    worker's position. `KERAS_DIST_COORDINATOR`, if set, is the address of the
    rendezvous. `KERAS_DIST_RESTARTS` is the number of times that the workers
    were restarted.

    Raises:
        ClusterError: From methods that need a variable that is absent or
            can't be read.

    Example:

    >>> from keras_dist.cluster_resolver import KerasDistClusterResolver
    >>> resolver = KerasDistClusterResolver.reading({
    ...     "KERAS_DIST_WORKERS": "10.0.0.1:9000,10.0.0.2:9000",
    ...     "KERAS_DIST_WORKER_INDEX": "0",
    ... })
    >>> resolver.task_type, resolver.task_id
    ('worker', 0)
    """

    def addresses(self) -> list[str]:
        """Returns the workers' addresses."""
        value = required(self._environ, WORKERS, _SET_BY)
        addresses = [address.strip() for address in value.split(",")]
        if not all(addresses):
            raise ClusterError(
                f"{WORKERS} must be addresses 'host:port', separated by "
                f"commas. Received: {value!r}."
            )
        return addresses

    def index(self) -> int:
        """Returns this worker's position."""
        index = integer(self._environ, INDEX, _SET_BY)
        number = len(self.addresses())
        if index >= number:
            raise ClusterError(
                f"{INDEX}={index} does not fit {WORKERS}, which names {number} "
                f"workers. Expected: 0 to {number - 1}."
            )
        return index

    @property
    def coordinator(self) -> str | None:
        """The address in `KERAS_DIST_COORDINATOR`; `None` if it is not set."""
        return self._environ.get(COORDINATOR, "").strip() or None

    @property
    def restarts(self) -> int:
        """The number in `KERAS_DIST_RESTARTS`; 0 if it is not set."""
        if not self._environ.get(RESTARTS):
            return 0
        return integer(self._environ, RESTARTS, _SET_BY)
