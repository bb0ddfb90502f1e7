"""Layouts of state and batches on devices, and steps compiled for them."""

import collections
import contextlib
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from jax.sharding import SingleDeviceSharding

from keras_dist.core.device import Device
from keras_dist.core.rows import UnequalLengths
from keras_dist_jax import arrays
from keras_dist_jax import batches
from keras_dist_jax.callbacks import Failures
from keras_dist_jax.callbacks import guarded

# A step of Keras' trainer: (state, data) to (outputs, new state).
StepFn = Callable[[Any, Any], tuple[Any, Any]]
# The shapes of the components of a per-replica value.
Shapes = tuple[tuple[int, ...], ...]
# A compiled step, the batch on its devices, and the rows if it was padded.
Call = tuple[Callable[..., Any], Any, int | None]


class BatchRouter(ABC):
    """A step compiled for a layout, with a program for each kind of batch."""

    @abstractmethod
    def route(self, data: Any) -> Call:
        """Returns a function of (state, batch, rows), its batch and its rows.

        `rows` is the batch's length if it was padded, else `None`.
        """


class Layout(ABC):
    """A placement of variables on this worker's devices, and in programs.

    `devices` has one `jax.Device` for each replica of this worker; `sharding`
    is that of a variable.
    """

    # Whether programs run on the devices of several workers, while each worker
    # has variables of its own.
    is_wide = False
    # Whether programs run on a mesh, which may have one device.
    is_mesh = False

    def __init__(self, devices: Sequence[Any], sharding: Any) -> None:
        self.devices = tuple(devices)
        self.sharding = sharding
        # The sharding, in programs, of values that each device has whole.
        self.whole = sharding
        # The number over all workers, and the position of the first of this
        # worker's devices among them.
        self.num_replicas = len(self.devices)
        self.first = 0
        # Whether steps must not be dispatched on top of each other.
        self.one_at_a_time = False
        self.unequal = UnequalLengths()

    def holds(self, array: Any) -> bool:
        """Tells whether an array lies on this layout already."""
        sharding = getattr(array, "sharding", None)
        return sharding is self.sharding or sharding == self.sharding

    def place(self, array: Any) -> Any:
        """Puts an array on this layout; the result may share its buffers."""
        return jax.device_put(array, self.sharding)

    def widen(self, array: Any) -> Any:
        """Converts a variable's array to the one that programs take."""
        return array

    def narrow(self, array: Any) -> Any:
        """Converts an array that a program gave to a variable's array."""
        return array

    def result(self, array: Any) -> Any:
        """Converts an array that a program gave to the one that users get."""
        return array

    def on_host(self, array: Any) -> np.ndarray[Any, Any]:
        """Copies a sharded array to host memory, with all workers' parts."""
        return arrays.own_part(array)

    def everyones(self, shapes: Sequence[Shapes]) -> list[Shapes]:
        """Returns the shapes that values have on all replicas, by one exchange.

        `shapes` has the shapes of each value's components on this worker.
        """
        return list(shapes)

    @abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Makes a device the default one for new arrays."""

    @abstractmethod
    def compile(
        self,
        step: StepFn,
        failures: Failures,
        donate: bool = False,
        gather: bool = False,
        is_sharded: bool = False,
    ) -> BatchRouter:
        """Compiles a step.

        Args:
            step: The step, a function that JAX can trace.
            failures: `Failures` that gets the exceptions of host callbacks.
            donate: Boolean, whether the step deletes the state that it is
            given.
            gather: Boolean, whether each device gets the outputs whole.
            is_sharded: Boolean, whether the step itself says how its state is
            sharded. Else each device has it whole.
        """

    @abstractmethod
    def eager(self, step: StepFn) -> BatchRouter:
        """Makes a step that runs operation by operation, for debugging."""


def default_device(device: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes a device JAX's default, unless it is already."""
    current = jax.config.jax_default_device or jax.local_devices()[0]
    if device == current:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = jax.default_device(device)
    return context


class SingleLayout(Layout):
    """Everything on one device, with batches as Keras passes them."""

    def __init__(self, device: Any) -> None:
        super().__init__((device,), SingleDeviceSharding(device))

    def holds(self, array: Any) -> bool:
        # JAX compiles one program for committed inputs and another one for
        # uncommitted ones.
        return super().holds(array) and array.committed

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return default_device(self.devices[0])

    def compile(
        self,
        step: StepFn,
        failures: Failures,
        donate: bool = False,
        gather: bool = False,
        is_sharded: bool = False,
    ) -> BatchRouter:
        call = _ignoring_rows(step)
        donated = 0 if donate else ()
        return _Direct(jax.jit(call, donate_argnums=donated, static_argnums=2))

    def eager(self, step: StepFn) -> BatchRouter:
        return _Direct(_ignoring_rows(step))


class MeshLayout(Layout):
    """State on each of several devices, with batches cut over them.

    The devices are all of one platform.
    """

    is_mesh = True

    def __init__(self, devices: Sequence[Any]) -> None:
        mesh = Mesh(
            np.array(devices), ("replica",), axis_types=(AxisType.Auto,)
        )
        super().__init__(devices, NamedSharding(mesh, PartitionSpec()))
        self.cut = NamedSharding(mesh, PartitionSpec("replica"))
        self.one_at_a_time = devices[0].platform == "cpu"

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        # Batches are made on the host: else all of them would pass through the
        # first accelerator.
        try:
            host = jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # JAX_PLATFORMS excludes the CPU
            host = self.devices[0]
        return default_device(self.devices[0] if self.one_at_a_time else host)

    def compile(
        self,
        step: StepFn,
        failures: Failures,
        donate: bool = False,
        gather: bool = False,
        is_sharded: bool = False,
    ) -> BatchRouter:
        traced = guarded(step, failures)
        outputs = self.whole if gather or self.is_wide else None
        # A sharded state has the shardings of the arrays that come in, and the
        # step constrains those of the new state.
        whole = None if is_sharded else self.whole

        def on_rows(state: Any, data: Any, rows: int | None) -> Any:
            if rows is not None:
                data = batches.unpad(data, rows, self.cut)
            return traced(state, data)

        on_rows.__name__ = step.__name__

        def on(batch_sharding: Any) -> Callable[..., Any]:
            compiled: Callable[..., Any] = jax.jit(
                on_rows,
                donate_argnums=0 if donate else (),
                static_argnums=2,
                in_shardings=(whole, batch_sharding),
                out_shardings=(outputs, whole),
            )
            return compiled

        return self._program(on(self.cut), on(self.whole))

    def routed(self, cut: Any, whole: Any) -> BatchRouter:
        """Makes a router of batches to one of two values.

        It puts a batch on devices, and gives `cut` for batches that are cut,
        padded or not, and `whole` for those that each replica gets whole.
        """
        return self._program(cut, whole)

    def _program(
        self, cut: Callable[..., Any], whole: Callable[..., Any]
    ) -> BatchRouter:
        return _Cut(self, cut, whole)

    def eager(self, step: StepFn) -> BatchRouter:
        return _Whole(self, _ignoring_rows(step))


def _ignoring_rows(step: StepFn) -> Callable[..., Any]:
    def call(state: Any, data: Any, rows: None) -> tuple[Any, Any]:
        return step(state, data)

    call.__name__ = step.__name__
    return call


class _Direct(BatchRouter):
    """A step that takes batches as they are."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def route(self, data: Any) -> Call:
        return self._call, data, None


class _Whole(BatchRouter):
    """A step of which each replica gets the whole batch.

    If batches were cut, operations that run one by one would each have a
    collective of their own, without a wait in between.
    """

    def __init__(self, layout: Layout, call: Callable[..., Any]) -> None:
        self._layout = layout
        self._call = call

    def route(self, data: Any) -> Call:
        return self._call, jax.tree.map(self._put, data), None

    def _put(self, leaf: Any) -> Any:
        layout = self._layout
        return batches.put_whole(leaf, layout.sharding, layout.devices)


class _Cut(_Whole):
    """A step whose batches are cut over the replicas, if they have enough rows.

    `cut` is the step for batches that are cut, padded or not, and `whole` the
    one for batches that each replica gets whole.
    """

    def __init__(
        self,
        layout: MeshLayout,
        cut: Callable[..., Any],
        whole: Callable[..., Any],
    ) -> None:
        super().__init__(layout, whole)
        self._sharding = layout.cut
        self._devices = layout.devices
        self._cut = cut

    def route(self, data: Any) -> Call:
        leaves, structure = jax.tree.flatten(data)
        devices, sharding = self._devices, self._sharding
        rows = batches.rows_to_cut(leaves, len(devices))
        if rows is None:
            batches.tell_if_unequal(leaves, self._layout.unequal)
            return super().route(data)
        data = structure.unflatten(
            [batches.put_cut(leaf, sharding, devices) for leaf in leaves]
        )
        return self._cut, data, rows if rows % len(devices) else None


_TYPES = {
    "cpu": "cpu",
    "gpu": "gpu",
    "cuda": "gpu",
    "rocm": "gpu",
    "tpu": "tpu",
}


def jax_devices() -> dict[Device, Any]:
    """Returns this worker's `jax.Device`s, the default platform's first."""
    found = list(jax.local_devices())
    if found[0].platform != "cpu":
        # JAX_PLATFORMS may exclude the CPU.
        with contextlib.suppress(RuntimeError):
            found += jax.local_devices(backend="cpu")
    seen: collections.Counter[str] = collections.Counter()
    devices = {}
    for device in found:
        type_ = _TYPES.get(device.platform)
        if type_ is not None:
            devices[Device(type_, seen[type_])] = device
            seen[type_] += 1
    return devices
