"""The choice of an executor, and the interfaces of sharded variables."""

import contextlib
from abc import ABC
from abc import abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.core.plan import Plan
from keras_dist.plugin.backend import Backend
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.executor import Executor
from keras_dist.plugin.targets import CompiledProgram
from keras_dist.plugin.targets import Target


class ShardsVariables(ABC):
    """A `Backend` whose executors can shard an optimizer's variables, or all
    large ones."""

    # False if a process keeps one shard, not one for each of its devices.
    has_shards_on_devices = True

    @abstractmethod
    def sharded_executor(self, plan: Plan) -> Executor:
        """Creates an executor that shards what a plan says.

        Raises `DeviceError` for a plan that asks for more than a process can.
        """

    def check_optimizer(self, optimizer: keras.Optimizer) -> None:
        """Raises `UnsupportedModelError` if it can't shard the state of an
        optimizer."""


def shards_on_devices(backend: Backend) -> bool:
    """Returns whether a process' devices can each keep their shards."""
    return (
        isinstance(backend, ShardsVariables) and backend.has_shards_on_devices
    )


def check_state_shards(optimizer: keras.Optimizer) -> None:
    """Refuses an optimizer whose state the backend can't shard."""
    backend = get_backend()
    if isinstance(backend, ShardsVariables):
        backend.check_optimizer(optimizer)


class HasLogicalDevices(ABC):
    """A `Backend` whose replicas can have several logical devices."""

    @abstractmethod
    def logical_executor(self, plan: Plan) -> Executor:
        """Creates an executor that divides variables by a plan's layouts."""


class UsesLogicalDevices(ABC):
    """An executor whose replicas have several logical devices."""

    @abstractmethod
    def split_tensor(self, tensor: object, parts: Sequence[int]) -> Any:
        """Divides a tensor over the logical devices of each replica.

        Outside of a compiled program, it returns the tensor.

        Args:
            tensor: Tensor of the backend.
            parts: Sequence with an integer for each axis, the number of its
                parts. Their product is 1, for a copy on each logical device,
                or the number of logical devices.
        """


class HasTPUs(ABC):
    """A `Backend` for machines with TPUs."""

    @abstractmethod
    def tpu_places(self) -> Sequence[Sequence[tuple[int, ...]]]:
        """Returns the place `(x, y, z, core)` of each core of a TPU, for each
        of its hosts, in the order of the host's devices; empty without TPUs.

        A cluster has been joined before."""


class CompilesForTargets(ABC):
    """A `Backend` that compiles for machines that are not here."""

    @abstractmethod
    def on_target(
        self, target: Target
    ) -> contextlib.AbstractContextManager[Sequence[int]]:
        """Returns a context in which a target's devices stand in for the
        backend's, and programs are traced in place of being run. It gives the
        number of devices of each worker. Variables must have no values.

        Raises `DeviceError` if the backend can't compile for the target."""

    @abstractmethod
    def compiled_step(
        self, executor: Executor, model: keras.Model, batch: object
    ) -> list[CompiledProgram]:
        """Compiles the step of `fit` for a batch of `keras.KerasTensor`s.

        The executor is one that was made in the context. Raises
        `UnsupportedModelError` if programs have been traced before.
        """


class Writing(ABC):
    """Variables on their way to files. Any thread may call its methods, since
    they take no collective."""

    @abstractmethod
    def write(self) -> str:
        """Writes this worker's parts; returns a text for the chief."""

    @abstractmethod
    def finish(self, texts: Sequence[str]) -> None:
        """Completes the files, on the chief, once all workers have written."""


class SavesShards(ABC):
    """A `Backend` that saves variables in shards, each worker its own.

    All workers call its methods together, with the same variables.
    """

    @abstractmethod
    def check_saving(self) -> None:
        """Raises `UnsupportedBackendError` if a package is missing."""

    @abstractmethod
    def save_shards(
        self,
        model: keras.Model,
        executor: Executor | None,
        variables: Mapping[str, keras.Variable],
        folder: str,
        copies: bool,
    ) -> Writing:
        """Begins to write variables, by name, to an empty folder. The executor
        is that of the model, or `None` for a model of no strategy. With
        `copies`, variables may change before they are written."""

    @abstractmethod
    def restore_shards(
        self,
        model: keras.Model,
        executor: Executor | None,
        variables: Mapping[str, keras.Variable],
        folder: str,
    ) -> None:
        """Sets variables to what `save_shards` wrote, in any place; their
        shapes and dtypes have been compared."""


class UpdatesShards(ABC):
    """A `ReplicaRunner` whose replicas update a shard of each variable."""

    @abstractmethod
    def update_shards(
        self,
        optimizer: keras.Optimizer,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable] | None,
    ) -> None:
        """Sums the weighted gradients of local replicas, all of which wait
        here, and lets each replica update its shards."""


class KeepsShards(ABC):
    """An executor that keeps only shards of some variables. All workers enter
    its contexts together, with the same variables."""

    @abstractmethod
    def readable_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the chief alone reads whole values."""

    @abstractmethod
    def written_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the chief alone assigns whole values, of
        which each worker takes its shards, at the end at the latest."""


def executor_of(plan: Plan) -> Executor:
    """Creates the executor that keeps variables as a plan says."""
    backend = get_backend()
    if plan.num_logical_devices > 1:
        check_logical_devices(plan.num_logical_devices)
        assert isinstance(backend, HasLogicalDevices)
        return backend.logical_executor(plan)
    if plan.is_central and not plan.is_one_device:
        return backend.central_executor(plan)
    if plan.shards:
        assert isinstance(backend, ShardsVariables)
        return backend.sharded_executor(plan)
    return backend.executor(plan)


def check_logical_devices(count: int) -> None:
    """Refuses several logical devices where the backend has one a replica."""
    if count > 1 and not isinstance(get_backend(), HasLogicalDevices):
        raise ValueError(
            f"On the backend '{keras.backend.backend()}', a replica computes "
            f"on one device. Received: {count} logical devices for each "
            "replica. Expected: 1, or a backend that can divide a replica "
            "('jax'), chosen with KERAS_BACKEND."
        )


def asks_to_shard(argument: str, value: object) -> bool:
    """Returns whether an argument of a strategy is `"sharded"`, and refuses
    it where the backend can't shard."""
    if value not in ("mirrored", "sharded"):
        raise ValueError(
            f"`{argument}` must say where variables are. Received: {value!r}. "
            "Expected: 'mirrored' or 'sharded'."
        )
    if value == "sharded" and not isinstance(get_backend(), ShardsVariables):
        raise ValueError(
            f"The backend '{keras.backend.backend()}' keeps a copy of each "
            f"variable on each replica. Received: {argument}='sharded'. "
            "Expected: 'mirrored', or a backend that can shard them ('jax' or "
            "'torch'), chosen with KERAS_BACKEND."
        )
    return bool(value == "sharded")
