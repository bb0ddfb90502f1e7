"""Links between variables and the inputs and outputs of compiled programs."""

import threading
import weakref
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import keras
from jax import lax

from keras_dist.plugins import SyncOnReadVariable
from keras_dist.plugins import opened
from keras_dist.plugins import outside_replicas
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.machine import current_machine
from keras_dist_jax.machine import described_value
from keras_dist_jax.machine import is_described
from keras_dist_jax.placement import arrays
from keras_dist_jax.placement.arrays import eagerly
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.placement.per_replica import join
from keras_dist_jax.placement.per_replica import parts_of
from keras_dist_jax.sharding import shards
from keras_dist_jax.variables.storage import ALIASED
from keras_dist_jax.variables.storage import place

# Held while programs take and replace the arrays of variables.
LOCK = threading.RLock()
# Attributes of a variable: the stacked array that a program gave, until it is
# read, and the layout of its replicas.
UNCOMBINED = "uncombined"
_LAYOUT = "_keras_dist_layout"


def is_per_replica(variable: keras.Variable) -> bool:
    """Tells whether each replica has its own value of a variable."""
    return isinstance(variable, SyncOnReadVariable)


class VariableBinding(ABC):
    """Links one variable to its input and output of compiled programs."""

    # As long as `attributes.get(key) is seen`, and the array was not lent, a
    # program takes `array`. Looking that up costs no call.

    donates = True  # programs may delete the array of a variable they write
    is_direct = True  # the variable has the very array that programs take
    sharding: Any = None  # on several devices; `None`: a copy on each

    def __init__(self, variable: keras.Variable, key: str) -> None:
        self.attributes = vars(variable)
        self.key = key
        self.seen: Any = None
        self.array: Any = None
        self.id = id(variable)
        self._variable = weakref.ref(variable)

    @property
    def variable(self) -> keras.Variable:
        """The variable, which callers keep alive."""
        variable = self._variable()
        assert variable is not None
        return variable

    @abstractmethod
    def refresh(self) -> Any:
        """Looks the array up again; `None` without a value."""

    def keep(self, array: object) -> None:
        """Stores a new array that a program gave."""
        self.attributes[self.key] = self.seen = self.array = array

    def take_away(self, on_read: Callable[..., Any]) -> None:
        """Empties the variable until `give_back`; a read calls `on_read`."""
        self.seen = self.array = None
        internals.take_away(self.variable, on_read)


class PlainBinding(VariableBinding):
    """A variable that is whole on one device, or on each."""

    def __init__(self, variable: keras.Variable, layout: Layout | None) -> None:
        super().__init__(variable, "_value")
        self._layout = layout

    def refresh(self) -> Any:
        variable = self.variable
        if self._layout is not None:
            place(variable, self._layout)
        array = original = internals.array_of(variable)
        if array is None:
            return self._described()
        if shards.is_sharded(variable):  # after the binding was made
            return self._copy(array)
        if self.attributes.pop(ALIASED, False):
            array = arrays.copy_of(array)
        if array.weak_type:  # programs return strong types: avoids a retrace
            array = lax.convert_element_type(array, array.dtype)
        if array is not original:
            internals.set_array(variable, array)
        self.array = self._copy(array)
        self.seen = array
        return self.array

    def _described(self) -> Any:
        """Returns an array without values, if programs don't run."""
        if current_machine() is None:
            return None
        sharding = None if self._layout is None else self._layout.sharding
        return self._copy(described_value(self.variable, sharding))

    def keep(self, array: object) -> None:
        stored = self._to_stored(array)
        if shards.is_sharded(self.variable):
            internals.set_array(self.variable, stored)
        else:
            # An interrupt in between makes the array be looked up again.
            self.seen = None
            self.array = array
            self.attributes[self.key] = stored
            self.seen = stored

    def _copy(self, array: object) -> Any:
        """Converts the variable's array to the one that programs take."""
        return array

    def _to_stored(self, copy: object) -> Any:
        """Converts an array that a program gave to the variable's."""
        return copy

    def give_back(self, array: object) -> None:
        """Undoes `take_away`; the array may be one of NumPy."""
        if is_described(array):
            return
        variable = self.variable
        if shards.is_sharded(variable):
            shards.give_back(variable, array)
            return
        internals.give_back(variable, array)
        if self._layout is not None:
            place(variable, self._layout)


class ShardedBinding(VariableBinding):
    """A sharded variable, whose whole value programs use."""

    def __init__(self, variable: keras.Variable) -> None:
        super().__init__(variable, shards.STORED)
        self._shards = shards.shards_of(variable)
        self.sharding = self._shards.sharding

    def refresh(self) -> Any:
        self.seen = self.array = shards.stored(self.variable)
        return self.array

    def give_back(self, array: object) -> None:
        """Undoes `take_away`; a NumPy array is this worker's part."""
        if is_described(array):
            return
        shards.give_back(self.variable, array)


class CopiedBinding(PlainBinding):
    """A variable of which programs on several devices take copies.

    It rests at `storage_layout`, or with `None`, outside any strategy, where
    it is.
    """

    is_direct = False

    def __init__(
        self,
        variable: keras.Variable,
        layout: Layout,
        storage_layout: Layout | None,
    ) -> None:
        super().__init__(variable, storage_layout)
        self._mesh = layout
        # A copy that was sent away can be deleted. Over several workers, the
        # variable's own array has the memory of the copy, and it has to be
        # there after a worker is lost in the middle of a program.
        self.donates = storage_layout is not None and not (
            {*storage_layout.devices} & {*layout.devices}
        )

    def _copy(self, array: object) -> Any:
        return self._mesh.to_global(self._mesh.place(array))

    def _to_stored(self, copy: Any) -> Any:
        if self._layout is None:
            return copy.addressable_shards[0].data
        local = self._mesh.to_local(copy)
        return (
            local if self._layout is self._mesh else self._layout.place(local)
        )

    def refresh(self) -> Any:
        copy = super().refresh()
        self._forget()
        return copy

    def keep(self, array: object) -> None:
        super().keep(array)
        self._forget()

    def _forget(self) -> None:
        # Copies on other devices than the variable's are too large to keep.
        if self._layout is not None and self._layout is not self._mesh:
            self.seen = self.array = None


class PerReplicaBinding(VariableBinding):
    """A variable of which each replica has a value; read, they are combined."""

    def __init__(self, variable: keras.Variable, layout: Layout) -> None:
        super().__init__(variable, UNCOMBINED)
        self._layout = layout
        self.sharding = layout.sharded

    def refresh(self) -> Any:
        variable: Any = self.variable
        if internals.array_of(variable) is None:
            if current_machine() is None:
                return None
            values = [described_value(variable, None)]
            return join(values, True, self._layout)
        values = [component.value for component in variable.values]
        self.seen = self.array = join(values, True, self._layout)
        return self.array

    def keep(self, array: object) -> None:
        if UNCOMBINED not in self.attributes:
            self.attributes[_LAYOUT] = self._layout
            self.attributes["combine"] = combine
        # Last, so that after an interrupt the array is never there without
        # what reads it.
        super().keep(array)


def combine(variable: keras.Variable) -> None:
    """Gives replicas their values, and the variable the combined one."""
    attributes = vars(variable)
    # The first read may come from a trace, a stateless scope or a replica.
    with LOCK, outside_replicas(), opened(None), eagerly():
        if UNCOMBINED in attributes:
            stacked = attributes[UNCOMBINED]
            parts = parts_of(stacked, True, attributes[_LAYOUT])
            try:
                del attributes[UNCOMBINED]
                variable.set_components(parts)
            except BaseException:
                attributes[UNCOMBINED] = stacked
                raise


# The binding of a variable whose array is in the hands of `fit`.
BindingInFit = PlainBinding | ShardedBinding


class Bindings:
    """The bindings of one compiler, each kept as long as programs use it."""

    def __init__(self) -> None:
        self._bindings: weakref.WeakValueDictionary[Any, VariableBinding] = (
            weakref.WeakValueDictionary()
        )

    def of(
        self, variable: keras.Variable, layout: Layout | None
    ) -> VariableBinding:
        """Returns a variable's binding to programs on a layout."""
        owner = vars(variable).get("distribute_strategy")
        key = id(variable), id(layout if owner is None else owner)
        binding = self._bindings.get(key)
        if binding is None or binding.attributes is not vars(variable):
            if owner is not None:
                layout = owner.executor.layout
            binding = self._bindings[key] = _binding_for(
                variable, owner, layout
            )
        return binding


def binding_in_fit(
    variable: keras.Variable, storage_layout: Layout
) -> BindingInFit:
    """Returns a binding to steps of a model; the variable rests there."""
    if shards.is_sharded(variable):
        return ShardedBinding(variable)
    return PlainBinding(variable, storage_layout)


def _binding_for(
    variable: keras.Variable, owner: Any, layout: Layout | None
) -> VariableBinding:
    if shards.is_sharded(variable):
        return ShardedBinding(variable)
    if layout is not None and is_per_replica(variable):
        return PerReplicaBinding(variable, layout)
    if layout is not None and owner is None:
        return CopiedBinding(variable, layout, None)
    if layout is not None and owner.executor.storage_layouts is not None:
        storage_layout = owner.executor.storage_layouts.of(variable)
        return CopiedBinding(variable, layout, storage_layout)
    if layout is not None and layout.is_global:
        return CopiedBinding(variable, layout, layout)
    return PlainBinding(variable, layout)
