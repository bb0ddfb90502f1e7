"""Options of input and of `run`, and the contexts of user functions."""

import enum
from dataclasses import dataclass
from typing import Any
from typing import NamedTuple
from typing import Self


@dataclass(frozen=True, repr=False)
class InputContext:
    """The input pipeline that a dataset function is called for.

    The function given to `distribute_datasets_from_function` receives one.

    Args:
        num_input_pipelines: Integer, number of pipelines: one for each worker,
            or, with `InputReplicationMode.PER_REPLICA`, for each replica.
        input_pipeline_id: Integer, the position of this pipeline, from 0.
        num_replicas_in_sync: Integer, number of replicas of all pipelines.

    Example:

    >>> context = keras_dist.InputContext(2, 1, num_replicas_in_sync=4)
    >>> context.get_per_replica_batch_size(12)
    3
    >>> print(context)
    keras_dist.InputContext(input pipeline id 1, total: 2)
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns one replica's part of a global batch size.

        Args:
            global_batch_size: Integer, number of rows of a step over all
                replicas.

        Returns:
            Integer, `global_batch_size / num_replicas_in_sync`.

        Raises:
            ValueError: If the size can't be divided evenly.

        Example:

        >>> context = keras_dist.InputContext(num_replicas_in_sync=6)
        >>> context.get_per_replica_batch_size(12)
        2
        """
        size, left = divmod(global_batch_size, self.num_replicas_in_sync)
        if left:
            raise ValueError(
                "The global batch size can't be divided evenly. Received: "
                f"global_batch_size={global_batch_size} with "
                f"{self.num_replicas_in_sync} replicas. Expected: a multiple "
                f"of {self.num_replicas_in_sync}, such as "
                f"{global_batch_size - left + self.num_replicas_in_sync}."
            )
        return size

    def __repr__(self) -> str:
        return (
            "keras_dist.InputContext(input pipeline id "
            f"{self.input_pipeline_id}, total: {self.num_input_pipelines})"
        )


class InputReplicationMode(enum.Enum):
    """The number of times that a dataset function is called.

    `PER_WORKER`: once for each worker, whose replicas take elements in turn.
    `PER_REPLICA`: once for each replica, which has its own dataset.

    Example:

    >>> keras_dist.InputReplicationMode.PER_REPLICA.value
    'PER_REPLICA'
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class _InputOptions(NamedTuple):
    experimental_fetch_to_device: bool
    experimental_replication_mode: InputReplicationMode
    experimental_place_dataset_on_device: bool
    experimental_per_replica_buffer_size: int


class InputOptions(_InputOptions):
    """Options of a distributed dataset.

    Args:
        experimental_fetch_to_device: Boolean. If true, a batch's parts are
            put on their replicas' devices; if false, they stay on the host
            (`cpu:0`). `None` means `True`.
        experimental_replication_mode: An `InputReplicationMode`.
        experimental_place_dataset_on_device: Boolean. If true, elements are
            put on the devices, although the dataset is still read on the host.
            It needs `PER_REPLICA` and `experimental_fetch_to_device=False`.
        experimental_per_replica_buffer_size: Integer, at least 0: the number
            of steps that are read and sent to the devices in advance. With 0,
            a step is read when it is requested.

    Example:

    >>> options = keras_dist.InputOptions(
    ...     experimental_per_replica_buffer_size=2
    ... )
    >>> options.experimental_fetch_to_device
    True
    """

    __slots__ = ()

    def __new__(
        cls,
        experimental_fetch_to_device: bool | None = None,
        experimental_replication_mode: InputReplicationMode = (
            InputReplicationMode.PER_WORKER
        ),
        experimental_place_dataset_on_device: bool = False,
        experimental_per_replica_buffer_size: int = 1,
    ) -> Self:
        if experimental_fetch_to_device is None:
            experimental_fetch_to_device = True
        return super().__new__(
            cls,
            experimental_fetch_to_device,
            experimental_replication_mode,
            experimental_place_dataset_on_device,
            experimental_per_replica_buffer_size,
        )


def check_input_options(options: InputOptions | None) -> InputOptions:
    """Returns checked options, the defaults for `None`."""
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise TypeError(
            "`options` must be a `keras_dist.InputOptions` or None. Received: "
            f"{options!r} of type {type(options).__name__}."
        )
    mode = InputReplicationMode(options.experimental_replication_mode)
    is_per_replica = mode is InputReplicationMode.PER_REPLICA
    if options.experimental_place_dataset_on_device:
        if not is_per_replica:
            raise ValueError(
                "When `experimental_place_dataset_on_device` is set, you must "
                "also specify `PER_REPLICA` for the replication mode. "
                f"Received: {options!r}."
            )
        if options.experimental_fetch_to_device:
            raise ValueError(
                "`experimental_place_dataset_on_device` can not be set to "
                "True when `experimental_fetch_to_device` is True (its "
                "default) and the replication mode is `PER_REPLICA`. "
                f"Received: {options!r}. Set "
                "`experimental_fetch_to_device=False`."
            )
    size = options.experimental_per_replica_buffer_size
    if not isinstance(size, int) or size < 0:
        raise ValueError(
            "`experimental_per_replica_buffer_size` must be an integer of at "
            f"least 0. Received: {size!r}."
        )
    return options._replace(experimental_replication_mode=mode)


class RunOptions(NamedTuple):
    """Options of `strategy.run`, for ported programs; they have no effect.

    In `tf.distribute` they affect the compilation for TPUs.

    Args:
        experimental_enable_dynamic_batch_size: Boolean, ignored.
        experimental_bucketizing_dynamic_shape: Boolean, ignored.
        experimental_xla_options: Any object, ignored.

    Example:

    >>> keras_dist.RunOptions().experimental_enable_dynamic_batch_size
    True
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


@dataclass(frozen=True, repr=False)
class ValueContext:
    """The replica that a function makes a value for.

    The function given to `experimental_distribute_values_from_function`
    receives one.

    Args:
        replica_id_in_sync_group: Integer, the replica's index, from 0.
        num_replicas_in_sync: Integer, number of replicas.

    Example:

    >>> print(keras_dist.experimental.ValueContext(1, 2))
    keras_dist.ValueContext(replica id 1, total replicas in sync: 2)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __repr__(self) -> str:
        return (
            "keras_dist.ValueContext(replica id "
            f"{self.replica_id_in_sync_group}, total replicas in sync: "
            f"{self.num_replicas_in_sync})"
        )


class CommunicationImplementation(enum.Enum):
    """The implementation of collectives between devices.

    `AUTO` leaves the choice to the backend; `RING` and `NCCL` are hints.

    Example:

    >>> keras_dist.experimental.CommunicationImplementation.AUTO.value
    'AUTO'
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


class _CommunicationOptions(NamedTuple):
    bytes_per_pack: int
    timeout_seconds: float | None
    implementation: CommunicationImplementation
    dtype: str | None


class CommunicationOptions(_CommunicationOptions):
    """Options of collectives between devices.

    Args:
        bytes_per_pack: Integer, at least 0. Values are sent in packs of
            about this many bytes; with 0 the backend chooses.
        timeout_seconds: Float, the longest time that a collective may take,
            or `None`.
        implementation: A `CommunicationImplementation`, or its name.
        dtype: String, `"float16"` or `"bfloat16"`, the dtype in which `float32`
            gradients are sent between workers; `None` for `float32`. Sums above
            65504 overflow in `"float16"`; `"bfloat16"` has the range of
            `float32`, and fewer digits.

    Raises:
        ValueError: If `bytes_per_pack` is negative, or `implementation` or
            `dtype` is something else.

    Example:

    >>> options = keras_dist.experimental.CommunicationOptions(
    ...     bytes_per_pack=50 * 1024 * 1024
    ... )
    >>> options.bytes_per_pack
    52428800
    """

    __slots__ = ()

    def __new__(
        cls,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = (
            CommunicationImplementation.AUTO
        ),
        dtype: str | None = None,
    ) -> Self:
        if bytes_per_pack < 0:
            raise ValueError(
                "`bytes_per_pack` must be at least 0. Received: "
                f"{bytes_per_pack!r}."
            )
        if isinstance(implementation, str):
            implementation = _parse(implementation)
        if not isinstance(implementation, CommunicationImplementation):
            raise ValueError(
                "`implementation` must be a `keras_dist.experimental."
                f"CommunicationImplementation`. Received: {implementation!r} "
                f"of type {type(implementation).__name__}."
            )
        if dtype not in (None, "float16", "bfloat16"):
            raise ValueError(
                "`dtype` must be None, 'float16' or 'bfloat16'. Received: "
                f"{dtype!r}."
            )
        return super().__new__(
            cls, bytes_per_pack, timeout_seconds, implementation, dtype
        )

    def __str__(self) -> str:
        return repr(self).replace(", ", ",", 1)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(bytes_per_pack={self.bytes_per_pack}, "
            f"timeout_seconds={self.timeout_seconds}, "
            f"implementation={self.implementation}"
            + (f", dtype={self.dtype!r})" if self.dtype else ")")
        )


def _parse(name: str) -> CommunicationImplementation:
    names = [
        implementation.value for implementation in CommunicationImplementation
    ]
    if name.upper() not in names:
        raise ValueError(
            f"`implementation` must be one of {names}. Received: {name!r}."
        )
    return CommunicationImplementation(name.upper())


class CollectiveHints(CommunicationOptions):
    """The older name of `CommunicationOptions`, without `implementation`.

    Args:
        bytes_per_pack: Integer, as for `CommunicationOptions`.
        timeout_seconds: Float or `None`, as for `CommunicationOptions`.

    Raises:
        ValueError: If `bytes_per_pack` is negative.

    Example:

    >>> keras_dist.experimental.CollectiveHints(timeout_seconds=5.0)[1]
    5.0
    """

    __slots__ = ()

    def __new__(
        cls, bytes_per_pack: int = 0, timeout_seconds: float | None = None
    ) -> Self:
        return super().__new__(cls, bytes_per_pack, timeout_seconds)


CollectiveCommunication = CommunicationImplementation
