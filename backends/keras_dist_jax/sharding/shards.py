"""Variables whose arrays are sharded over the replicas."""

import math
from typing import Any
from typing import NamedTuple

import jax
import keras
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from keras_dist.plugins import Axes
from keras_dist.plugins import in_symbolic_scope
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.machine import current_machine
from keras_dist_jax.machine import described_value
from keras_dist_jax.machine import is_described
from keras_dist_jax.placement import arrays
from keras_dist_jax.placement.arrays import eagerly
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.programs.jaxprs import AXIS

# Attributes of a sharded variable: its array, and the array's `Shards`.
STORED = "_keras_dist_stored"
_SHARDS = "_keras_dist_shards"
# Set on variables that an optimizer has for one that it updates.
_SLOT = "_keras_dist_is_slot"
# With fewer elements, a variable is not worth a collective.
LEAST_ELEMENTS = 1024


class ReplicaShard(NamedTuple):
    """The shape of a variable, and of the part that a replica has."""

    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    shards: "Shards | None" = None


class Shards:
    """The sharding of a variable of one shape over a layout's devices.

    An axis that the number of replicas does not divide is stored with zeros
    behind it. The array of a scalar has one axis.

    Args:
        shape: Tuple of integers.
        layout: The `Layout`.
        axes: `Axes` that the logical devices of a replica divide.
        over_replicas: Boolean, true if the replicas divide one of the others.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        layout: Layout,
        axes: Axes = (),
        over_replicas: bool = True,
    ) -> None:
        self.layout = layout
        # Reads and writes the variable while only this worker does.
        self.requests: Any = None
        self.shape, self._axes = tuple(shape), axes
        count = layout.num_replicas
        of_array = self.shape or (1,)
        divided = [axis for axis, name in enumerate(axes) if name is not None]
        free = [axis for axis in range(len(of_array)) if axis not in divided]
        # The largest axis that splits into equal parts, or else the largest
        # axis.
        self._axis = max(
            free if over_replicas else (),
            key=lambda axis: (of_array[axis] % count == 0, of_array[axis]),
            default=None,
        )
        spec: list[Any] = [None] * len(of_array)
        parts, stored = list(of_array), list(of_array)
        for axis in divided:
            spec[axis] = tuple(layout.logical_axes)
            parts[axis] //= layout.num_logical
        mesh = layout.replicated.mesh
        # The sharding of the value that a layer computes with.
        self.used = layout.replicated
        if divided:
            self.used = NamedSharding(mesh, PartitionSpec(*spec))
        if self._axis is not None:
            spec[self._axis] = AXIS
            parts[self._axis] = -(-of_array[self._axis] // count)
            stored[self._axis] = parts[self._axis] * count
        self.shard_shape, self.stored_shape = tuple(parts), tuple(stored)
        self.sharding = NamedSharding(mesh, PartitionSpec(*spec))
        # Whether replicas have parts, and the part that a replica has in a
        # replica function, where the compiler divides the other axes.
        self.is_over_replicas = self._axis is not None
        if self._axis is not None:
            stored[self._axis] //= count
        self.replica_shard = ReplicaShard(self.shape, tuple(stored), self)

    def stored(self, value: Any) -> Any:
        """Converts a whole value to the array's shape."""
        library = jnp if isinstance(value, jax.Array) else np
        value = library.reshape(value, self.shape or (1,))
        if value.shape == self.stored_shape:
            return value
        pairs = zip(self.stored_shape, value.shape, strict=True)
        return library.pad(value, [(0, more - size) for more, size in pairs])

    def whole(self, array: jax.Array) -> Any:
        """Converts an array, traced or of the host, to the whole value."""
        return self.constrained(self._cut(array))

    def _cut(self, array: jax.Array) -> Any:
        slices = tuple(slice(size) for size in self.shape or (1,))
        return array[slices].reshape(self.shape)

    def constrained(self, value: object) -> Any:
        """Shards a traced whole value; a scalar is left as it is."""
        if not self.shape or not isinstance(value, jax.core.Tracer):
            return value
        return jax.lax.with_sharding_constraint(value, self.sharding)

    @property
    def spec_of_shards(self) -> PartitionSpec:
        """The spec by which replica functions take and give parts."""
        assert self._axis is not None
        return PartitionSpec(*[None] * self._axis, AXIS)

    def gathered(self, part: object) -> Any:
        """Gathers the parts that replicas have in a function."""
        assert self._axis is not None
        array = jax.lax.all_gather(part, AXIS, axis=self._axis, tiled=True)
        return self._cut(array)

    def scattered(self, value: object) -> Any:
        """Sums replicas' own whole values in a function; returns a part."""
        return jax.lax.psum_scatter(
            self.stored(value), AXIS, scatter_dimension=self._axis, tiled=True
        )

    def own_shard(self, value: object) -> Any:
        """Returns a replica's part of a whole value in a function."""
        assert self._axis is not None
        size = self.replica_shard.shard_shape[self._axis]
        start = jax.lax.axis_index(AXIS) * size
        return jax.lax.dynamic_slice_in_dim(
            self.stored(value), start, size, self._axis
        )

    def of_slices(self) -> "Shards | None":
        """Returns the shards of slices along the first axis, `None` if a slice
        is all in one part."""
        if len(self.shape) < 2 or self._axis in (None, 0):
            return None
        if self._axes[:1] not in ((), (None,)):
            return None
        return Shards(self.shape[1:], self.layout, self._axes[1:])

    def on_host(self, array: jax.Array, name: str) -> np.ndarray[Any, Any]:
        """Returns the whole value of an array, in host memory."""
        value: np.ndarray[Any, Any] = self.whole(
            self.layout.on_host(array, name)
        )
        return value

    def placed(self, value: object) -> Any:
        """Puts a whole value on the layout's devices."""
        with eagerly():
            return self.layout.place(value)

    def put(self, value: Any) -> Any:
        """Makes the array of a whole value that each worker has."""
        if is_described(value):
            return jax.ShapeDtypeStruct(
                self.stored_shape, value.dtype, sharding=self.sharding
            )
        return self._divided(self.stored(np.asarray(value)))

    def put_own(self, part: np.ndarray[Any, Any]) -> Any:
        """Makes the array from this worker's part, as `own_shard` gives it."""
        if part.shape == self.stored_shape:
            return self._divided(part)
        assert self._axis is not None
        first = self.layout.first * self.shard_shape[self._axis]
        return self._divided(part, first)

    def _divided(self, value: np.ndarray[Any, Any], first: int = 0) -> Any:
        """Makes the array of a value, which begins at `first` of its axis."""
        shape, axis = self.stored_shape, self._axis
        places = self.sharding.addressable_devices_indices_map(shape)

        def part_on(device: object) -> Any:
            place = [*places[device]]
            if axis is not None and first:
                ends = place[axis]
                place[axis] = slice(ends.start - first, ends.stop - first)
            return jax.device_put(value[tuple(place)], device)

        # Copies: a device may use the memory of the array that it is given.
        placed = [arrays.copy_of(part_on(d)) for d in self.layout.holders]
        return jax.make_array_from_single_device_arrays(
            self.stored_shape, self.sharding, placed
        )


def mark_slot(variable: keras.Variable) -> None:
    """Notes that an optimizer has the variable for another of its shape."""
    vars(variable)[_SLOT] = True


def is_slot(variable: keras.Variable) -> bool:
    """Tells whether an optimizer has the variable for another of its shape."""
    return _SLOT in vars(variable)


def is_large(variable: keras.Variable) -> bool:
    """Tells whether a variable's shape is worth sharding."""
    shape = variable.shape
    is_known = shape is not None and None not in shape
    return (
        is_known
        and variable.synchronization != "on_read"
        and math.prod(shape) >= LEAST_ELEMENTS
    )


def is_sharded(variable: keras.Variable) -> bool:
    """Tells whether each replica keeps a part of a variable."""
    return _SHARDS in vars(variable)


def split(variable: keras.Variable, division: Shards) -> None:
    """Leaves each device only its part of a variable; cheap to repeat."""
    value = None if is_sharded(variable) else internals.array_of(variable)
    if (
        value is None
        and current_machine() is not None
        and not is_sharded(variable)
    ):
        value = described_value(variable, division.layout.sharding)
    if value is None or isinstance(value, jax.core.Tracer) or not value.size:
        return
    with eagerly():
        begin(variable, division, division.put(value))


def begin(variable: keras.Variable, division: Shards, array: jax.Array) -> None:
    """Gives a variable its array in parts."""
    attributes = vars(variable)
    attributes[_SHARDS], attributes[STORED] = division, array
    attributes.pop("_value", None)


def host_value_of(variable: keras.Variable) -> Any:
    """Returns the whole value of a sharded variable, in host memory."""
    if stored(variable) is None:
        return None
    requests = shards_of(variable).requests
    return (requests.read if requests else gathered_on_host)(variable)


def gathered_on_host(variable: keras.Variable) -> np.ndarray[Any, Any]:
    """Returns the whole value in host memory; all workers call it."""
    # A variable may be read while a function is traced.
    with eagerly():
        return shards_of(variable).on_host(stored(variable), variable.path)


def value_of(variable: keras.Variable) -> Any:
    """Returns the whole value of a sharded variable, which is not kept."""
    array = stored(variable)
    if in_symbolic_scope() and array is not None:
        # Only the shape counts, and a trace needs no collective for it.
        zeros = jnp.zeros(variable.shape, array.dtype)
        if isinstance(zeros, jax.core.Tracer):
            return zeros
    value = host_value_of(variable)
    return None if value is None else shards_of(variable).placed(value)


def set_value(variable: keras.Variable, value: object) -> None:
    """Replaces the whole value of a sharded variable; `None` empties it."""
    shards = shards_of(variable)
    if value is None:
        set_array(variable, None)
    elif shards.requests is not None:
        shards.requests.write(variable, value)
    else:
        value = shards.layout.chiefs(value, variable.path)
        set_array(variable, shards.put(value))


def set_array(variable: keras.Variable, array: jax.Array) -> None:
    """Gives a sharded variable its array."""
    vars(variable)[STORED] = array


def stored(variable: keras.Variable) -> Any:
    """Returns the `jax.Array` of a sharded variable, or `None`."""
    return vars(variable)[STORED]


def shards_of(variable: keras.Variable) -> Shards:
    """Returns the `Shards` of a sharded variable."""
    shards: Shards = vars(variable)[_SHARDS]
    return shards


def give_back(variable: keras.Variable, array: jax.Array) -> None:
    """Undoes `keras_internals.take_away`, with a new array or own part."""
    if not isinstance(array, jax.Array):
        array = shards_of(variable).put_own(array)
    internals.give_back(variable, None)
    vars(variable)[STORED] = array
