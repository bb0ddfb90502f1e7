"""What people set about input, values and communication, as data."""

import enum
from typing import Any
from typing import NamedTuple
from typing import Self


class InputContext:
    """Where an input function is: its pipeline, and how many there are.

    A function given to `distribute_datasets_from_function` receives one.

    Args:
        num_input_pipelines: Integer, number of pipelines: one a worker, or
            one a replica in `InputReplicationMode.PER_REPLICA`.
        input_pipeline_id: Integer, which of them this is.
        num_replicas_in_sync: Integer, replicas of all pipelines together.

    Example:

    >>> context = keras_dist.InputContext(2, 1, num_replicas_in_sync=4)
    >>> context.get_per_replica_batch_size(12)
    3
    >>> print(context)
    keras_dist.InputContext(input pipeline id 1, total: 2)
    """

    def __init__(
        self,
        num_input_pipelines: int = 1,
        input_pipeline_id: int = 0,
        num_replicas_in_sync: int = 1,
    ) -> None:
        self._num_input_pipelines = num_input_pipelines
        self._input_pipeline_id = input_pipeline_id
        self._num_replicas_in_sync = num_replicas_in_sync

    @property
    def num_input_pipelines(self) -> int:
        """How many pipelines read data."""
        return self._num_input_pipelines

    @property
    def input_pipeline_id(self) -> int:
        """Which of the pipelines this is, from 0."""
        return self._input_pipeline_id

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas are fed by all pipelines together."""
        return self._num_replicas_in_sync

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """One replica's part of a global batch size.

        Args:
            global_batch_size: Integer, rows of a step over all replicas.

        Returns:
            Integer, `global_batch_size / num_replicas_in_sync`.

        Raises:
            ValueError: If it can't be divided evenly.

        Example:

        >>> context = keras_dist.InputContext(num_replicas_in_sync=6)
        >>> context.get_per_replica_batch_size(12)
        2
        """
        size, left = divmod(global_batch_size, self._num_replicas_in_sync)
        if left:
            raise ValueError(
                "The global batch size can't be divided evenly. Received: "
                f"global_batch_size={global_batch_size} with "
                f"{self._num_replicas_in_sync} replicas. Expected: a multiple "
                f"of {self._num_replicas_in_sync}, such as "
                f"{global_batch_size - left + self._num_replicas_in_sync}."
            )
        return size

    def __repr__(self) -> str:
        return (
            "keras_dist.InputContext(input pipeline id "
            f"{self._input_pipeline_id}, total: {self._num_input_pipelines})"
        )


class InputReplicationMode(enum.Enum):
    """How often an input function is called.

    `PER_WORKER`: once a worker; its replicas take elements in turn.
    `PER_REPLICA`: once a replica; each replica has its own dataset.

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
    """How a dataset is distributed.

    Args:
        experimental_fetch_to_device: Boolean. Whether a batch's parts are
            put on their replicas' devices; if not, they stay on the host
            (`cpu:0`). `None` means `True`.
        experimental_replication_mode: An `InputReplicationMode`.
        experimental_place_dataset_on_device: Boolean. Whether the dataset
            itself is on the devices. It needs `PER_REPLICA` and
            `experimental_fetch_to_device=False`. Datasets are read on the
            host all the same; the elements are put on the devices.
        experimental_per_replica_buffer_size: Integer, at least 0. How many
            steps are read and sent to the devices ahead of the one that is
            asked for. With 0 nothing is read before it is asked for.

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
    """The options, or the default ones for `None`.

    Raises:
        ValueError: If they contradict each other.
        TypeError: If they are something else.
    """
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
    """Options of `strategy.run`, for programs that set them.

    They are about compilation for TPUs, and change nothing here.

    Args:
        experimental_enable_dynamic_batch_size: Boolean.
        experimental_bucketizing_dynamic_shape: Boolean.
        experimental_xla_options: Any object.

    Example:

    >>> keras_dist.RunOptions().experimental_enable_dynamic_batch_size
    True
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


class ValueContext:
    """Which replica's value a function is asked for.

    A function given to `experimental_distribute_values_from_function`
    receives one.

    Args:
        replica_id_in_sync_group: Integer, the replica, from 0.
        num_replicas_in_sync: Integer, how many there are.

    Example:

    >>> print(keras_dist.experimental.ValueContext(1, 2))
    keras_dist.ValueContext(replica id 1, total replicas in sync: 2)
    """

    def __init__(
        self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1
    ) -> None:
        self._replica_id_in_sync_group = replica_id_in_sync_group
        self._num_replicas_in_sync = num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        """The replica, from 0."""
        return self._replica_id_in_sync_group

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are."""
        return self._num_replicas_in_sync

    def __repr__(self) -> str:
        return (
            "keras_dist.ValueContext(replica id "
            f"{self._replica_id_in_sync_group}, total replicas in sync: "
            f"{self._num_replicas_in_sync})"
        )
