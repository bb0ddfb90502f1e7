"""MultiWorkerMirroredStrategy: a copy of the model on each worker's devices."""

import functools
import sys
import warnings
from typing import Any
from typing import final

from keras_dist.cluster_resolver import ClusterResolver
from keras_dist.cluster_resolver import cluster_of
from keras_dist.cluster_resolver import detect
from keras_dist.core.device import default_devices
from keras_dist.core.options import CommunicationImplementation
from keras_dist.core.options import CommunicationOptions
from keras_dist.core.plan import Cluster
from keras_dist.core.plan import Plan
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.powers import check_optimizer_state
from keras_dist.plugin.powers import check_variables
from keras_dist.plugin.randomness import share_random_state
from keras_dist.plugin.workers import note_joined
from keras_dist.plugin.workers import watch_exceptions
from keras_dist.strategies.strategy import Strategy


class MultiWorkerStrategy(Strategy):
    """Base class of `MultiWorkerMirroredStrategy`, current and `compat.v1`."""

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        optimizer_state: str = "mirrored",
        variables: str = "mirrored",
    ) -> None:
        shards_optimizer = check_optimizer_state(optimizer_state)
        shards_variables = check_variables(variables)
        reason = ""
        if cluster_resolver is None:
            cluster_resolver, reason = detect()
        self._cluster_resolver = cluster_resolver
        plan = multi_worker_plan(
            cluster_resolver,
            communication_options,
            shards_optimizer,
            shards_variables,
        )
        super().__init__(plan)
        start_together(self, reason)

    @property
    def cluster_resolver(self) -> Any:
        """The `ClusterResolver` in use; `None` without a cluster."""
        return self._cluster_resolver


@final
class MultiWorkerMirroredStrategy(MultiWorkerStrategy):
    """Synchronous training on the devices of several workers.

    Every worker runs the same script, with the same data and the global batch
    size. It computes on its own rows. Create the strategy before anything
    uses the framework. Without a cluster, there is one worker.

    Args:
        cluster_resolver: A `ClusterResolver`. `None` looks for the environment
            variables of `keras-dist run`, TF_CONFIG, torchrun, SLURM and MPI,
            and the chief prints which of them it uses.
        communication_options: A `CommunicationOptions`, or `None`.
        optimizer_state: String, `"mirrored"` for a copy of the optimizer's
            variables on each device, or `"sharded"`: each replica of all
            workers keeps and updates its shard. Reading a sharded variable is
            a collective, so all workers have to read it.
        variables: String, `"mirrored"` for a copy of each variable on each
            device, or `"sharded"`: each replica of all workers keeps only its
            shard of variables of at least 1,024 elements, those of the
            optimizer included. A layer gets the whole value while it computes.
            Elsewhere, all workers have to read such a variable together.

    Raises:
        ClusterError: If the workers can't be determined or can't be reached.
        WorkerLostError: If not all workers connect in time.
        RuntimeError: If the framework has been used already.
        ValueError: If `optimizer_state` or `variables` is any other value, or
            if the backend can't shard them.

    Example:

    >>> strategy = keras_dist.MultiWorkerMirroredStrategy()
    >>> strategy.extended.should_checkpoint
    True
    """


def start_together(strategy: Strategy, reason: str) -> None:
    """Gives all workers one random state, and says why there are several."""
    workers = strategy.executor.workers
    if workers is not None:
        if reason and strategy.plan.is_chief:
            _say(reason)
        share_random_state(get_backend(), workers)


@functools.cache
def _say(reason: str) -> None:
    """Prints why there is a cluster, once in each process."""
    print(f"keras_dist: {reason}", file=sys.stderr)


def multi_worker_plan(
    resolver: ClusterResolver | None,
    options: CommunicationOptions | None,
    shards_optimizer: bool = False,
    shards_variables: bool = False,
) -> Plan:
    """Joins the cluster, if any, and plans a replica on each device."""
    options = CommunicationOptions() if options is None else options
    if not isinstance(options, CommunicationOptions):
        raise TypeError(
            "`communication_options` must be a `keras_dist.experimental."
            f"CommunicationOptions`. Received: {options!r} of type "
            f"{type(options).__name__}."
        )
    cluster = join_workers(resolver, options)
    devices = default_devices(get_backend().list_devices())
    return Plan(
        tuple((device,) for device in devices),
        devices,
        cluster,
        shards_optimizer=shards_optimizer,
        shards_variables=shards_variables,
    )


def join_workers(
    resolver: ClusterResolver | None, options: CommunicationOptions
) -> Cluster | None:
    """Joins a resolver's cluster, and returns it; `None` for one worker."""
    # TensorFlow's own resolvers work too: they have the same methods.
    if resolver is not None and not hasattr(resolver, "cluster_spec"):
        raise TypeError(
            "`cluster_resolver` must be a `keras_dist.cluster_resolver."
            f"ClusterResolver`. Received: {resolver!r} of type "
            f"{type(resolver).__name__}."
        )
    cluster = None if resolver is None else cluster_of(resolver)
    if cluster is not None:
        watch_exceptions()
        get_backend().join(cluster, options)
        note_joined()
    return cluster


def experimental_multi_worker_mirrored(
    communication: CommunicationImplementation | str = (
        CommunicationImplementation.AUTO
    ),
    cluster_resolver: ClusterResolver | None = None,
) -> MultiWorkerMirroredStrategy:
    """Creates a `keras_dist.MultiWorkerMirroredStrategy`; deprecated.

    Args:
        communication: A `CommunicationImplementation`, or its name.
        cluster_resolver: A `ClusterResolver`. `None` looks for the environment
            variables of a cluster.
    """
    warnings.warn(
        "`experimental.MultiWorkerMirroredStrategy` is deprecated. Use "
        "`keras_dist.MultiWorkerMirroredStrategy`.",
        DeprecationWarning,
        stacklevel=2,
    )
    return MultiWorkerMirroredStrategy(
        cluster_resolver, CommunicationOptions(implementation=communication)
    )
