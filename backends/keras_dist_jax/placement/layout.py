"""Layouts of state and batches on devices, and steps compiled for them."""

import collections
import contextlib
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from keras_dist.plugins import Device
from keras_dist.plugins import UnequalLengths
from keras_dist_jax.machine import described
from keras_dist_jax.machine import is_described
from keras_dist_jax.machine import is_elsewhere
from keras_dist_jax.machine import jit
from keras_dist_jax.machine import local_devices
from keras_dist_jax.placement import arrays
from keras_dist_jax.placement import batches
from keras_dist_jax.placement.meshes import mesh_on
from keras_dist_jax.placement.meshes import shardings_on
from keras_dist_jax.programs.jaxprs import edited
from keras_dist_jax.programs.products import untransposed
from keras_dist_jax.programs.uneven import with_whole_rows

# Names of the state's groups in a training step.
_GROUPS = ("trainable", "non-trainable", "optimizer", "metrics")
# A step of Keras' trainer: (state, data) to (outputs, new state).
StepFn = Callable[[Any, Any], tuple[Any, Any]]


class Programs(NamedTuple):
    """The programs of one step, for batches that are replicated, or sharded."""

    # Functions of (state, batch, rows), `rows` being `None` without padding.
    replicated: Callable[..., Any]
    sharded: Callable[..., Any]


class Layout(ABC):
    """A placement of variables on this worker's devices, and in programs."""

    # Whether programs run on the devices of several workers, while each worker
    # has variables of its own.
    is_global = False
    # Whether programs run on a mesh, which may have one device.
    is_mesh = False

    def __init__(self, devices: Sequence[Any], sharding: Any) -> None:
        # The first device of each replica, and all devices of the replicas.
        self.devices = self.holders = tuple(devices)
        self.sharding = sharding
        # The shardings, in programs, of values that each device has whole, and
        # of those that the replicas divide.
        self.replicated = self.sharded = sharding
        # The number of replicas on all workers, and the position among them of
        # this worker's first device.
        self.num_replicas = len(self.devices)
        self.first = 0
        # Whether steps must not be dispatched on top of each other.
        self.one_at_a_time = False
        # What changes the program of a step for the devices' compiler.
        self.edits: tuple[Callable[[Any], Any], ...] = ()
        # The axes of a replica's mesh, by name; none for one device.
        self.logical_axes: dict[str, int] = {}
        self.unequal = UnequalLengths()

    @property
    def num_logical(self) -> int:
        """Number of logical devices of each replica."""
        return len(self.holders) // len(self.devices)

    def spread(self, values: Sequence[Any]) -> list[Any]:
        """Repeats each replica's value for each of its devices."""
        copies = range(self.num_logical)
        return [value for value in values for _ in copies]

    def holds(self, array: jax.Array) -> bool:
        """Tells whether an array lies on this layout already."""
        sharding = getattr(array, "sharding", None)
        return sharding is self.sharding or sharding == self.sharding

    def place(self, array: jax.Array) -> Any:
        """Puts an array on this layout; the result may share its buffers."""
        if is_described(array):
            return described(array, self.sharding)
        return jax.device_put(array, self.sharding)

    def to_global(self, array: jax.Array) -> Any:
        """Converts a variable's array to the one that programs take."""
        return array

    def to_local(self, array: jax.Array) -> Any:
        """Converts an array that a program gave to a variable's array."""
        return array

    def result(self, array: jax.Array) -> Any:
        """Converts an array that a program gave to the one that users get."""
        return array

    def on_host(self, array: jax.Array, name: str) -> np.ndarray[Any, Any]:
        """Copies a sharded array to host memory, with all workers' parts.

        All workers have to read the array of the same name.
        """
        return arrays.own_shard(array)

    def chiefs(self, value: object, name: str) -> Any:
        """Returns the chief's value, for all workers to assign."""
        return value

    def are_even(self, values: Sequence[Any]) -> bool:
        """Tells whether arrays have equal shapes on all workers, which ask."""
        return True

    def is_for_all(self, flag: bool) -> bool:
        """Tells whether something holds for all workers, which ask."""
        return flag

    def compare_program(self, described: str) -> None:
        """Raises an error if workers' programs exchange other values."""

    @abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Makes a device the default one for new arrays."""

    def compile(
        self,
        step: StepFn,
        donate: bool = False,
        gather: bool = False,
        is_sharded: bool = False,
    ) -> Programs:
        """Compiles a step; with `donate` it deletes the state that it is given.

        With `gather` each device gets the outputs whole; with `is_sharded` the
        step itself says how its state is sharded.
        """
        replicated, sharded = None, None
        if self.is_mesh:
            replicated, sharded = self.replicated, self.sharded
        outputs = replicated if gather or self.is_global else None
        # A sharded state has the shardings of the arrays that come in, and the
        # step constrains those of the new state.
        state = None if is_sharded else replicated

        def on(batch: object) -> Callable[..., Any]:
            compiled: Callable[..., Any] = jit(
                _with_rows(step, self.unpad, self.uneven),
                _named,
                donate_argnums=0 if donate else (),
                static_argnums=2,
                in_shardings=(state, batch),
                out_shardings=(outputs, state),
            )
            return compiled

        return Programs(on(replicated), on(sharded))

    def uneven(self, step: StepFn) -> StepFn:
        """Converts a step to one for a batch in unequal shares."""
        return step

    def unpad(self, data: object, rows: int | None) -> Any:
        """Removes the padding rows of a sharded batch inside of a trace."""
        return data if rows is None else batches.unpad(data, rows, self.sharded)

    def eager(self, step: StepFn) -> Programs:
        """Makes a step that runs operation by operation, for debugging."""
        call = _with_rows(step, lambda data, rows: data, lambda step: step)
        return Programs(call, call)

    def put_batch(self, data: object) -> tuple[bool, Any, int | None]:
        """Returns whether a batch is sharded, it, and its rows if padded."""
        return False, data, None

    def put_whole(self, data: object) -> Any:
        """Puts a batch on each of this worker's devices, for eager steps."""
        return data


def _named(state: Any, data: Any, rows: int | None) -> dict[str, Any]:
    """Names the arguments of a step."""
    return {**dict(zip(_GROUPS, state, strict=False)), "batch": data}


def _with_rows(
    step: StepFn,
    unpad: Callable[[Any, Any], Any],
    uneven: Callable[[StepFn], StepFn],
) -> Any:
    """Makes a function of (state, batch, rows) of a step."""

    def call(state: object, data: object, rows: int | None) -> tuple[Any, Any]:
        run = step if rows is None else uneven(step)
        return run(state, unpad(data, rows))

    call.__name__ = step.__name__
    return call


def default_device(device: object) -> contextlib.AbstractContextManager[Any]:
    """Makes a device JAX's default, unless it is already."""
    current = jax.config.jax_default_device or jax.local_devices()[0]
    if device == current or is_elsewhere(device):
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = jax.default_device(device)
    return context


class SingleLayout(Layout):
    """Everything on one device, with batches as Keras passes them."""

    def __init__(self, device: Any) -> None:
        super().__init__((device,), SingleDeviceSharding(device))

    def holds(self, array: jax.Array) -> bool:
        # JAX compiles one program for committed inputs and another one for
        # uncommitted ones.
        return super().holds(array) and array.committed

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return default_device(self.devices[0])


class MeshLayout(Layout):
    """State on each of several devices, with batches sharded over them."""

    is_mesh = True

    def __init__(self, replicas: Sequence[Sequence[Any]]) -> None:
        replicated, sharded = shardings_on(mesh_on(replicas))
        super().__init__([devices[0] for devices in replicas], replicated)
        self.holders = tuple(
            device for devices in replicas for device in devices
        )
        self.logical_axes = dict([*replicated.mesh.shape.items()][1:])
        self.sharded = sharded
        self.one_at_a_time = self.devices[0].platform == "cpu"
        self.edits = (untransposed,) if self.one_at_a_time else ()

    def uneven(self, step: StepFn) -> StepFn:
        mesh = self.replicated.mesh
        return edited(step, lambda program: with_whole_rows(program, mesh))

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        # Batches are made on the host: else all of them would pass through the
        # first accelerator.
        try:
            host = jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # JAX_PLATFORMS excludes the CPU
            host = self.devices[0]
        return default_device(self.devices[0] if self.one_at_a_time else host)

    def put_batch(self, data: object) -> tuple[bool, Any, int | None]:
        leaves, structure = jax.tree.flatten(data)
        rows = batches.rows_to_cut(leaves, self.num_replicas)
        if rows is None:
            batches.tell_if_unequal(data, self.unequal)
            put = batches.put_whole
            placed = [
                put(leaf, self.replicated, self.holders) for leaf in leaves
            ]
            return False, structure.unflatten(placed), None
        count = self.num_replicas
        placed = [batches.put_sharded(leaf, self) for leaf in leaves]
        return True, structure.unflatten(placed), rows if rows % count else None

    def put_whole(self, data: object) -> Any:
        # Cut ones would need a collective for each operation.
        return jax.tree.map(
            lambda x: batches.put_whole(x, self.sharding, self.holders), data
        )


class LayoutWorkers(Protocol):
    """The collectives of workers that a layout over several of them needs."""

    def sizes(self, numbers: Sequence[int]) -> list[list[int]]:
        """Returns each worker's sizes of arguments."""

    def gather(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """Returns each worker's tensors."""

    def whole_batch(
        self, batch: object, shares_of: Callable[[int], Sequence[range]]
    ) -> Any:
        """Gathers a batch of which each worker has loaded its own rows."""

    def broadcast(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the chief's tensors."""

    def barrier(self, what: str) -> None:
        """Waits for all workers, which have to come for the same."""

    def compare_program(self, described: str) -> None:
        """Raises an error if workers' programs exchange other values."""


class WideLayout(MeshLayout):
    """State on each device of each worker, with batches sharded over all."""

    is_global = True

    def __init__(
        self,
        replicas: Sequence[Sequence[Sequence[Any]]],
        worker: int,
        workers: "LayoutWorkers",
    ) -> None:
        local = replicas[worker]
        super().__init__(local)
        if len(self.holders) == 1:
            self.sharding = SingleDeviceSharding(self.holders[0])
        everyones = [
            replica
            for worker_replicas in replicas
            for replica in worker_replicas
        ]
        self.replicated, self.sharded = shardings_on(mesh_on(everyones))
        self.num_replicas = len(everyones)
        self.first = worker * len(local)
        self._workers = workers

    def put_whole(self, data: object) -> Any:
        def shares_of(total: int) -> Sequence[range]:
            shares = batches.shares(np.zeros((total, 0)), self.num_replicas)
            return shares[self.first : self.first + len(self.devices)]

        data = self._workers.whole_batch(data, shares_of)
        return super().put_whole(data)

    def holds(self, array: jax.Array) -> bool:
        return super().holds(array) and array.committed

    def place(self, array: jax.Array) -> Any:
        # Arrays that are divided over the workers stay as they are.
        return super().place(array) if _is_local(array) else array

    def to_global(self, array: jax.Array) -> Any:
        if is_described(array):
            is_own = array.sharding == self.sharding
            return described(array, self.replicated) if is_own else array
        if not array.is_fully_addressable:
            return array
        return jax.make_array_from_single_device_arrays(
            array.shape, self.replicated, self._copies(array)
        )

    def to_local(self, array: jax.Array) -> Any:
        if _is_local(array) or not array.is_fully_replicated:
            return array
        copies = self._copies(array)
        if len(copies) == 1:
            return copies[0]
        return jax.make_array_from_single_device_arrays(
            array.shape, self.sharding, copies
        )

    def _copies(self, array: jax.Array) -> list[Any]:
        shards = {s.device: s.data for s in array.addressable_shards}
        return [shards[device] for device in self.holders]

    def result(self, array: jax.Array) -> Any:
        if _is_local(array) or not array.is_fully_replicated:
            return array
        return array.addressable_data(0)

    def on_host(self, array: jax.Array, name: str) -> np.ndarray[Any, Any]:
        jax.block_until_ready(array)
        axis, part = arrays.axis_of(array), arrays.own_shard(array)
        if axis is None:  # each worker has all of it
            return part
        self._workers.barrier(f"a read of {name}")
        gathered = self._workers.gather([part])
        return np.concatenate(
            [np.asarray(value) for (value,) in gathered], axis
        )

    def chiefs(self, value: object, name: str) -> Any:
        self._workers.barrier(f"an assignment of {name}")
        return self._workers.broadcast([value])[0]

    def compare_program(self, described: str) -> None:
        self._workers.compare_program(described)

    def is_for_all(self, flag: bool) -> bool:
        return all(value for (value,) in self._workers.sizes([int(flag)]))

    def are_even(self, values: Sequence[Any]) -> bool:
        unknown = [
            np.shape(value)
            for value in values
            if np.ndim(value) and _is_local(value) and not is_even(value)
        ]
        if not unknown:
            return True
        numbers = [n for shape in unknown for n in (len(shape), *shape)]
        gathered = self._workers.sizes(numbers)
        return all(received == numbers for received in gathered)


# An attribute of arrays.
_EVEN = "_keras_dist_even"


def mark_even(array: jax.Array) -> None:
    """Notes that an array has equal shapes on all workers."""
    if isinstance(array, jax.Array):
        setattr(array, _EVEN, True)


def is_even(array: jax.Array) -> bool:
    """Tells whether an array is known to have equal shapes on all workers."""
    return hasattr(array, _EVEN)


def _is_local(array: jax.Array) -> bool:
    return not isinstance(array, jax.Array) or array.is_fully_addressable


_TYPES = {
    "cpu": "cpu",
    "gpu": "gpu",
    "cuda": "gpu",
    "rocm": "gpu",
    "tpu": "tpu",
}


def jax_devices() -> dict[Device, Any]:
    """Returns this worker's `jax.Device`s, the default platform's first."""
    available = list(local_devices())
    if available[0].platform != "cpu":
        # JAX_PLATFORMS may exclude the CPU.
        with contextlib.suppress(RuntimeError):
            available += jax.local_devices(backend="cpu")
    seen: collections.Counter[str] = collections.Counter()
    devices = {}
    for device in available:
        type_ = _TYPES.get(device.platform)
        if type_ is not None:
            devices[Device(type_, seen[type_])] = device
            seen[type_] += 1
    return devices
