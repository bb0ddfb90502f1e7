"""TPUStrategy: a copy of the model on each core of a TPU."""

import enum
import warnings
from typing import Any
from typing import final

from keras_dist.core.device import Device
from keras_dist.core.device import resolve_devices
from keras_dist.core.device_assignment import DeviceAssignment
from keras_dist.core.plan import Plan
from keras_dist.errors import DeviceError
from keras_dist.plugin.capabilities import asks_to_shard
from keras_dist.plugin.capabilities import check_logical_devices
from keras_dist.strategies.extended import StrategyExtended
from keras_dist.strategies.logical_devices import divide_devices
from keras_dist.strategies.logical_devices import layouts_for
from keras_dist.strategies.multi_worker_mirrored import start_together
from keras_dist.strategies.strategy import Strategy
from keras_dist.strategies.tpu_system import TPUSystem
from keras_dist.strategies.tpu_system import find_tpus


@final
class TPUStrategy(Strategy):
    """Synchronous training on the cores of a TPU.

    Each core is a replica, with a copy of every variable, as in a
    `MirroredStrategy`. On a TPU with several hosts, run the same script on
    each of them, and create the strategy before anything uses the framework.
    TPUs need the JAX backend: TensorFlow traces one program for all cores of a
    TPU, but keras_dist on TensorFlow traces one for each replica. To try a
    program without a TPU, let the CPU devices stand in for its cores: pass
    `TPUClusterResolver("virtual")`, or set the environment variable TPU_NAME
    to `virtual`.

    Args:
        tpu_cluster_resolver: A `TPUClusterResolver`, another
            `ClusterResolver` of the workers on the TPU's hosts, or `None` for
            the TPU of this host. Without addresses, the workers are those that
            the environment variables of a launcher name, or of the slice
            (TPU_WORKER_HOSTNAMES and TPU_WORKER_ID).
        experimental_device_assignment: A
            `keras_dist.tpu.experimental.DeviceAssignment`, or `None` for one
            replica on each core. A replica may have several cores of one
            host: they are its logical devices. On several hosts, replicas
            must have the same cores of each host, and they are in the hosts'
            order.
        experimental_spmd_xla_partitioning: Boolean. If true,
            `experimental_assign_to_logical_device` raises `ValueError`.
        optimizer_state: String, `"mirrored"` or `"sharded"`, as in a
            `MultiWorkerMirroredStrategy`.
        variables: String, `"mirrored"` or `"sharded"`, as in a
            `MultiWorkerMirroredStrategy`.
        layout_map: Mapping from patterns to layouts, as in a
            `MirroredStrategy`, of the variables that the cores of a replica
            divide.

    Raises:
        DeviceError: If there is no TPU, if the assignment has other cores, or
            if a replica has cores of several hosts.
        ClusterError: If the workers can't be determined, can't be reached,
            pass different arguments, or are not on all hosts.
        ValueError: If `optimizer_state`, `variables` or `layout_map` is any
            other value.

    Example:

    >>> resolver = keras_dist.cluster_resolver.TPUClusterResolver("virtual")
    >>> strategy = keras_dist.TPUStrategy(resolver)
    >>> strategy.num_replicas_in_sync == len(keras_dist.list_devices("cpu"))
    True
    """

    def __init__(
        self,
        tpu_cluster_resolver: object = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        optimizer_state: str = "mirrored",
        variables: str = "mirrored",
        layout_map: object = None,
    ) -> None:
        shards_optimizer = asks_to_shard("optimizer_state", optimizer_state)
        shards_variables = asks_to_shard("variables", variables)
        num_cores = _num_cores(experimental_device_assignment)
        check_logical_devices(num_cores or 1)
        layouts = layouts_for(layout_map, num_cores, _NEEDED)
        system = find_tpus(tpu_cluster_resolver)
        devices = _devices(system, experimental_device_assignment)
        self._cluster_resolver = system.resolver
        self._is_spmd = experimental_spmd_xla_partitioning
        plan = Plan(
            divide_devices(devices, num_cores),
            devices,
            system.cluster,
            shards_optimizer=shards_optimizer,
            shards_variables=shards_variables,
            layouts=layouts,
        )
        super().__init__(plan)
        start_together(self, system.reason)

    @property
    def cluster_resolver(self) -> Any:
        """The resolver in use; by default a `TPUClusterResolver`."""
        return self._cluster_resolver

    @property
    def extended(self) -> "TPUExtended":
        """The `StrategyExtended`, with the properties of a TPU's hosts."""
        return TPUExtended(self)

    def experimental_assign_to_logical_device(
        self, tensor: object, logical_device_id: int
    ) -> Any:
        if self._is_spmd:
            raise ValueError(
                "In SPMD mode, a tensor can't be assigned to one logical "
                f"device. Received: logical_device_id={logical_device_id!r}. "
                "Make the TPUStrategy with "
                "`experimental_spmd_xla_partitioning=False`."
            )
        return super().experimental_assign_to_logical_device(
            tensor, logical_device_id
        )


_NEEDED = "an `experimental_device_assignment` with num_cores_per_replica=n"


def _num_cores(assignment: object) -> int | None:
    """Returns the number of cores of each replica; `None` if it is not said."""
    if assignment is None:
        return None
    if not isinstance(assignment, DeviceAssignment):
        raise TypeError(
            "`experimental_device_assignment` must be a `keras_dist.tpu."
            f"experimental.DeviceAssignment`. Received: {assignment!r} of "
            f"type {type(assignment).__name__}."
        )
    return assignment.num_cores_per_replica


def _devices(
    system: TPUSystem, assignment: DeviceAssignment | None
) -> tuple[Device, ...]:
    """Returns this worker's devices that compute, in replica order."""
    if assignment is None:
        return system.devices
    by_task: dict[int, list[tuple[int, ...]]] = {}
    cores = range(assignment.num_cores_per_replica)
    for replica in range(assignment.num_replicas):
        tasks = {
            assignment.topology.task_ordinal_at_coordinates(
                assignment.coordinates(replica, core)
            )
            for core in cores
        }
        if len(tasks) > 1:
            raise DeviceError(
                "The cores of a replica must be on one host. Received: replica "
                f"{replica} with cores of the hosts {sorted(tasks)}. Expected: "
                "a `computation_shape` that fits into the cores of a host, or "
                "another order of the cores; `variables='sharded'` divides "
                "variables over all hosts."
            )
        ordinals = tuple(assignment.tpu_ordinal(replica, c) for c in cores)
        by_task.setdefault(tasks.pop(), []).append(ordinals)
    num_hosts = len(system.places)
    every = [sorted(replicas) for replicas in by_task.values()]
    if sorted(by_task) != list(range(num_hosts)) or any(
        replicas != every[0] for replicas in every
    ):
        raise ValueError(
            "A device assignment needs replicas on each host, on the same "
            f"cores of each.\nReceived: cores by task, {by_task}. Expected: "
            f"tasks 0 to {num_hosts - 1}. Build it with the topology that "
            "`initialize_tpu_system` returns."
        )
    kind = system.devices[0].type
    chosen = by_task[0] if num_hosts == 1 else every[0]
    return resolve_devices(
        [
            Device(kind, ordinal)
            for replica_ordinals in chosen
            for ordinal in replica_ordinals
        ],
        system.devices,
        "experimental_device_assignment",
    )


@final
class TPUExtended(StrategyExtended):
    """`strategy.extended` of a `TPUStrategy`."""

    @property
    def num_hosts(self) -> int:
        """Number of hosts with replicas, each of which has a worker."""
        return self._strategy.plan.num_workers

    @property
    def num_replicas_per_host(self) -> int:
        """Number of replicas of each host."""
        return self._strategy.plan.num_local_replicas

    @property
    def tpu_hardware_feature(self) -> "HardwareFeature":
        """The `HardwareFeature`: hardware for embeddings."""
        return HardwareFeature()


@final
class HardwareFeature:
    """Hardware for embeddings, which a TPU may have beside its cores.

    keras_dist looks up embeddings on the cores, whatever the TPU has.

    Example:

    >>> keras_dist.tpu.experimental.HardwareFeature().embedding_feature.value
    'UNSUPPORTED'
    """

    class EmbeddingFeature(enum.Enum):
        """Versions of the hardware: `UNSUPPORTED`, `V1` and `V2`."""

        UNSUPPORTED = "UNSUPPORTED"
        V1 = "V1"
        V2 = "V2"

    @property
    def embedding_feature(self) -> EmbeddingFeature:
        """`UNSUPPORTED`, since no hardware for embeddings is used."""
        return self.EmbeddingFeature.UNSUPPORTED

    @property
    def num_embedding_devices_per_chip(self) -> int:
        """0, since no hardware for embeddings is used."""
        return 0


def experimental_tpu(
    tpu_cluster_resolver: object = None,
    device_assignment: DeviceAssignment | None = None,
) -> TPUStrategy:
    """Creates a `keras_dist.TPUStrategy`; deprecated.

    Args:
        tpu_cluster_resolver: A `TPUClusterResolver`, or `None`.
        device_assignment: A `DeviceAssignment`, or `None` for all cores.
    """
    warnings.warn(
        "`experimental.TPUStrategy` is deprecated. Use "
        "`keras_dist.TPUStrategy`.",
        DeprecationWarning,
        stacklevel=2,
    )
    return TPUStrategy(tpu_cluster_resolver, device_assignment)
