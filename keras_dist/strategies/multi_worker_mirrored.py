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
from keras_dist.core.variable_layouts import VariableLayouts
from keras_dist.errors import ClusterError
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.capabilities import asks_to_shard
from keras_dist.plugin.membership import note_joined
from keras_dist.plugin.membership import watch_exceptions
from keras_dist.plugin.randomness import code_of
from keras_dist.plugin.randomness import share_random_state
from keras_dist.plugin.workers import Workers
from keras_dist.strategies.logical_devices import check_count
from keras_dist.strategies.logical_devices import divide_devices
from keras_dist.strategies.logical_devices import layouts_for
from keras_dist.strategies.strategy import Strategy


class MultiWorkerStrategy(Strategy):
    """Base class of `MultiWorkerMirroredStrategy`, current and `compat.v1`."""

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        optimizer_state: str = "mirrored",
        variables: str = "mirrored",
        logical_devices: int | None = None,
        layout_map: object = None,
    ) -> None:
        shards_optimizer = asks_to_shard("optimizer_state", optimizer_state)
        shards_variables = asks_to_shard("variables", variables)
        check_count(logical_devices)
        layouts = layouts_for(layout_map, logical_devices)
        reason = ""
        if cluster_resolver is None:
            cluster_resolver, reason = detect()
        self._cluster_resolver = cluster_resolver
        plan = multi_worker_plan(
            cluster_resolver,
            communication_options,
            shards_optimizer,
            shards_variables,
            logical_devices,
            layouts,
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
            then for a worker of Ray Train, and the chief prints which of
            them it uses.
        communication_options: A `CommunicationOptions`, or `None`.
        optimizer_state: String, `"mirrored"` for a copy of the optimizer's
            variables on each device, or `"sharded"`: each replica of all
            workers keeps and updates its shard, or, on PyTorch, each worker.
            Reading a sharded variable is
            a collective, so all workers have to read it.
        variables: String, `"mirrored"` for a copy of each variable on each
            device, or `"sharded"`: each replica of all workers keeps only its
            shard of variables of at least 1,024 elements, those of the
            optimizer included. A layer gets the whole value while it computes.
            Elsewhere, all workers have to read such a variable together.
        logical_devices: Integer, the number of devices of each replica, all
            of them on one worker, as in a `MirroredStrategy`. `None` means 1.
            With 4 workers of 8 devices each and `logical_devices=4`, there
            are 8 replicas, 2 on each worker.
        layout_map: Mapping from patterns to layouts, as in a
            `MirroredStrategy`. It is the same on all workers.

    Raises:
        ClusterError: If the workers can't be determined or can't be reached,
            or if they pass different arguments.
        DeviceError: If `logical_devices` does not divide a worker's devices.
        TypeError: If an argument is any other object.
        WorkerLostError: If not all workers connect in time.
        RuntimeError: If the framework has been used already.
        ValueError: If `optimizer_state`, `variables`, `logical_devices` or
            `layout_map` is any other value, or if the backend can't shard
            variables or divide a replica.

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
        _check_alike(strategy.plan, workers)
        share_random_state(get_backend(), workers)


def _check_alike(plan: Plan, workers: Workers) -> None:
    """Raises `ClusterError` if workers divide devices or variables apart."""
    kinds = {True: "sharded", False: "mirrored"}
    settings = (
        f"optimizer_state='{kinds[plan.shards_optimizer]}', "
        f"variables='{kinds[plan.shards_variables]}', "
        f"{plan.num_logical_devices} logical device(s) for each replica, "
        f"layout_map={dict(plan.layouts.patterns) if plan.layouts else {}}"
    )
    if len(set(workers.concatenate_numbers([code_of(settings)]))) == 1:
        return
    texts = enumerate(workers.texts(settings))
    received = "; ".join(f"{text} on worker {index}" for index, text in texts)
    raise ClusterError(
        "All workers have to make the same strategy.\nReceived: "
        f"{received}. Expected: the same arguments on each worker. Run the "
        "same script, with the same settings, on every worker."
    )


@functools.cache
def _say(reason: str) -> None:
    """Prints why there is a cluster, once in each process."""
    print(f"keras_dist: {reason}", file=sys.stderr)


def multi_worker_plan(
    resolver: ClusterResolver | None,
    options: CommunicationOptions | None,
    shards_optimizer: bool = False,
    shards_variables: bool = False,
    logical_devices: int | None = None,
    layouts: VariableLayouts | None = None,
) -> Plan:
    """Joins the cluster, if any, and plans replicas on all devices."""
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
        divide_devices(devices, logical_devices),
        devices,
        cluster,
        shards_optimizer=shards_optimizer,
        shards_variables=shards_variables,
        layouts=layouts,
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
    if resolver is None:
        get_backend().check_alone()
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
