"""Layouts: where state and batches lie, and how a step is compiled for it."""

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

from keras_dist.core.unequal_rows import UnequalLengths
from keras_dist_jax import arrays
from keras_dist_jax import batches
from keras_dist_jax.callbacks import Failures
from keras_dist_jax.callbacks import guarded

# A step as Keras writes it: (state, data) to (outputs, new state).
StepFn = Callable[[Any, Any], tuple[Any, Any]]
# Of the components of a per-replica value.
Shapes = tuple[tuple[int, ...], ...]
# A compiled step, the batch as it takes it, and the rows if it was padded.
Call = tuple[Callable[..., Any], Any, int | None]


class StepOfParts(ABC):
    """How a step goes whose optimizer's state is cut over the devices."""

    @abstractmethod
    def of_parts(self, step: StepFn) -> StepFn:
        """A step of whole variables, as one of a state that is cut."""

    @abstractmethod
    def scattered(
        self, step: Callable[..., Any], num_rows: int
    ) -> Callable[..., Any]:
        """The step, with gradients that are summed where they are needed.

        Args:
            step: Callable that can be traced, from nests of arrays.
            num_rows: Integer, the rows of its batch, which is cut.
        """


class Program(ABC):
    """A step, compiled for a layout: for each kind of batch, what to call."""

    @abstractmethod
    def route(self, data: Any) -> Call:
        """What to call with (state, batch, rows) for one batch of data."""


class Layout(ABC):
    """Where the state of a model lies, on one device or on several.

    Args:
        devices: The `jax.Device`s of this worker, one for each replica.
        sharding: Where a variable lies.
    """

    # Whether programs run on the devices of several workers, while variables
    # lie on those of one.
    is_wide = False
    # Whether programs run on a mesh of devices, be it of one.
    is_mesh = False

    def __init__(self, devices: Sequence[Any], sharding: Any) -> None:
        self.devices = tuple(devices)
        self.sharding = sharding
        # Where programs have what each device has whole.
        self.whole = sharding
        # Over all workers; and the position of the first of these devices.
        self.num_replicas = len(self.devices)
        self.first = 0
        # Whether steps must not be dispatched on top of each other.
        self.one_at_a_time = False
        self.unequal = UnequalLengths()

    def holds(self, array: Any) -> bool:
        """Whether an array lies here already."""
        sharding = getattr(array, "sharding", None)
        return sharding is self.sharding or sharding == self.sharding

    def place(self, array: Any) -> Any:
        """The array, here. It may share a buffer with the one given."""
        return jax.device_put(array, self.sharding)

    def widen(self, array: Any) -> Any:
        """A variable's array, as programs take it."""
        return array

    def narrow(self, array: Any) -> Any:
        """An array that a program gave, as variables have it."""
        return array

    def result(self, array: Any) -> Any:
        """An array that a program gave, as users have it."""
        return array

    def cut_up(self, rows: np.ndarray[Any, Any]) -> Any:
        """An array of which each replica has as many rows, in new memory.

        Args:
            rows: NumPy array, the same on each worker. Zeros follow its last
                row until that is possible.
        """
        share = -(-len(rows) // self.num_replicas)
        start = self.first * share
        own = rows[start : start + share * len(self.devices)]
        missing = share * len(self.devices) - len(own)
        widths = [(0, missing), *[(0, 0)] * (own.ndim - 1)]
        return self.cut_up_own(np.pad(own, widths))

    def cut_up_own(self, rows: np.ndarray[Any, Any]) -> Any:
        """`cut_up`, of the rows of this worker's replicas."""
        shares = np.split(rows, len(self.devices))
        # Copies: a device may use the memory of the array that it is given.
        placed = [
            arrays.copy_of(jax.device_put(share, device))
            for share, device in zip(shares, self.devices, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(
            (len(shares[0]) * self.num_replicas, *rows.shape[1:]),
            NamedSharding(self.whole.mesh, PartitionSpec("replica")),
            placed,
        )

    def all_rows(self, array: Any) -> np.ndarray[Any, Any]:
        """What `cut_up` made, as a NumPy array; of all workers together."""
        return arrays.own_rows(array)

    def everyones(self, shapes: Sequence[Shapes]) -> list[Shapes]:
        """The shapes that values have on all replicas, in one exchange.

        Args:
            shapes: Sequence of the shapes of each value's local components.
        """
        return list(shapes)

    @abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Where arrays go that are made with no device in mind."""

    @abstractmethod
    def compile(
        self,
        step: StepFn,
        failures: Failures,
        donate: bool = False,
        gather: bool = False,
        parts: "StepOfParts | None" = None,
    ) -> Program:
        """Compiles a step.

        Args:
            step: The step, a function that JAX can trace.
            failures: Where the exceptions of host callbacks go.
            donate: Whether it deletes the state that it is given.
            gather: Whether each device gets its outputs whole.
            parts: What the step's state needs if it is not whole on each
                device.
        """

    @abstractmethod
    def eager(self, step: StepFn) -> Program:
        """A step that runs operation by operation, for debugging."""


def default_device(device: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes a device JAX's default, unless it is already."""
    current = jax.config.jax_default_device or jax.local_devices()[0]
    if device == current:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = jax.default_device(device)
    return context


class SingleLayout(Layout):
    """Everything on one device, batches as Keras passes them.

    Args:
        device: A `jax.Device`.
    """

    def __init__(self, device: Any) -> None:
        super().__init__((device,), SingleDeviceSharding(device))

    def holds(self, array: Any) -> bool:
        # An array that JAX may still move would make two kinds of input of
        # one, and two programs.
        return super().holds(array) and array.committed

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return default_device(self.devices[0])

    def compile(
        self,
        step: StepFn,
        failures: Failures,
        donate: bool = False,
        gather: bool = False,
        parts: "StepOfParts | None" = None,
    ) -> Program:
        call = _ignoring_rows(step)
        donated = 0 if donate else ()
        return _Direct(jax.jit(call, donate_argnums=donated, static_argnums=2))

    def eager(self, step: StepFn) -> Program:
        return _Direct(_ignoring_rows(step))


class MeshLayout(Layout):
    """State on each of several devices, batches cut over them.

    Args:
        devices: The `jax.Device`s, all of one platform.
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
        # Batches come to the host first, or all of them would pass through
        # one of the accelerators.
        try:
            host = jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # the process was told to have accelerators only
            host = self.devices[0]
        return default_device(self.devices[0] if self.one_at_a_time else host)

    def compile(
        self,
        step: StepFn,
        failures: Failures,
        donate: bool = False,
        gather: bool = False,
        parts: "StepOfParts | None" = None,
    ) -> Program:
        traced = guarded(step, failures)
        outputs = self.whole if gather or self.is_wide else None
        # With parts, the state lies as it comes, and the step says how the
        # new one does.
        whole = self.whole if parts is None else None

        def on_rows(state: Any, data: Any, rows: int | None) -> Any:
            if rows is not None:
                data = batches.unpad(data, rows, self.cut)
            elif parts is not None and (count := _rows_of(data)):
                return parts.scattered(traced, count)(state, data)
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

    def routed(self, cut: Any, whole: Any) -> Program:
        """Puts batches in their places, and says which of two they need.

        Args:
            cut: What batches need that are cut, or padded and cut.
            whole: What batches need that each replica gets whole.
        """
        return self._program(cut, whole)

    def _program(
        self, cut: Callable[..., Any], whole: Callable[..., Any]
    ) -> Program:
        return _Cut(self, cut, whole)

    def eager(self, step: StepFn) -> Program:
        return _Whole(self, _ignoring_rows(step))


def _rows_of(data: Any) -> int | None:
    return batches.common_rows(jax.tree.leaves(data))


def _ignoring_rows(step: StepFn) -> Callable[..., Any]:
    def call(state: Any, data: Any, rows: None) -> tuple[Any, Any]:
        return step(state, data)

    call.__name__ = step.__name__
    return call


class _Direct(Program):
    """Batches go to the step as they are."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def route(self, data: Any) -> Call:
        return self._call, data, None


class _Whole(Program):
    """Each replica gets the whole batch.

    Operations that run one by one would otherwise each have a collective of
    their own, with nobody to wait in between.
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
    """Each batch is cut over the replicas, if it has enough rows.

    Args:
        layout: The `MeshLayout`.
        cut: The step for batches that are cut, or padded and cut.
        whole: The step for batches that each replica gets whole.
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
