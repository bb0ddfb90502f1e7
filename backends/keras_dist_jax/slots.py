"""Links between variables and the inputs and outputs of compiled programs."""

import threading
import weakref
from abc import ABC
from abc import abstractmethod
from typing import Any

import jax
import keras
from jax import lax

from keras_dist.internals.keras_internals import opened
from keras_dist.replica.state import outside_replicas
from keras_dist_jax import arrays
from keras_dist_jax import keras_internals as internals
from keras_dist_jax import shards
from keras_dist_jax.joined import join
from keras_dist_jax.joined import parts_of
from keras_dist_jax.layout import Layout
from keras_dist_jax.placement import LENT
from keras_dist_jax.placement import take
from keras_dist_jax.tracing import eagerly
from keras_dist_jax.tracing import is_split

# Held while programs take and replace the arrays of variables.
LOCK = threading.RLock()
# Attributes of a variable: the stacked array that a program gave, until it is
# read, and the layout of its replicas.
UNCOMBINED = "uncombined"
_LAYOUT = "_keras_dist_layout"


class Slot(ABC):
    """Links one variable to its input and output of compiled programs."""

    # As long as `attributes.get(key) is seen`, and the array was not lent, a
    # program takes `array`. Looking that up costs no call.

    donates = True  # programs may delete the array of a variable they write
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

    def inside(self, array: Any) -> Any:
        """Converts the array that a program takes to the variable's value."""
        return array

    def outside(self, value: Any) -> Any:
        """Converts the variable's value to the array that a program gives."""
        return value

    def keep(self, array: Any) -> None:
        """Stores a new array that a program gave."""
        self.attributes[self.key] = self.seen = self.array = array


class WholeSlot(Slot):
    """A variable with one copy, or with a copy on each device."""

    def __init__(self, variable: keras.Variable, layout: Layout | None) -> None:
        super().__init__(variable, "_value")
        self._layout = layout

    def refresh(self) -> Any:
        variable = self.variable
        if shards.is_sharded(variable):  # after the slot was made
            return internals.array_of(variable)
        if internals.array_of(variable) is None:
            return None
        if self._layout is not None:
            take(variable, self._layout)
        elif self.attributes.pop(LENT, False):
            array = arrays.copy_of(internals.array_of(variable))
            internals.set_array(variable, array)
        array = _strong(internals.array_of(variable))
        if array is not internals.array_of(variable):
            internals.set_array(variable, array)
        self.seen = self.array = array
        return array

    def keep(self, array: Any) -> None:
        if shards.is_sharded(self.variable):
            internals.set_array(self.variable, array)
        else:
            super().keep(array)


class ShardedSlot(Slot):
    """A sharded variable, whose whole value programs use."""

    def __init__(self, variable: keras.Variable) -> None:
        super().__init__(variable, shards.STORED)
        self._shards = shards.shards_of(variable)
        self.sharding = self._shards.sharding

    def refresh(self) -> Any:
        self.seen = self.array = shards.stored(self.variable)
        return self.array

    def inside(self, array: Any) -> Any:
        if not isinstance(array, jax.core.Tracer):
            return internals.array_of(self.variable)
        return self._shards.whole(array)

    def outside(self, value: Any) -> Any:
        return self._shards.stored(value)


class WideSlot(WholeSlot):
    """A variable of a program that several workers run."""

    donates = False  # its own array shares memory with the one of programs

    def __init__(self, variable: keras.Variable, layout: Layout) -> None:
        super().__init__(variable, layout)
        self._wide = layout

    def refresh(self) -> Any:
        array = super().refresh()
        if array is None:
            return None
        self.array = self._wide.widen(array)
        return self.array

    def keep(self, array: Any) -> None:
        self.attributes[self.key] = self.seen = self._wide.narrow(array)
        self.array = array


class CopiedSlot(Slot):
    """A variable of which programs on several devices take copies.

    It rests at `home`, or with `None`, outside any strategy, where it is.
    """

    donates = False

    def __init__(
        self, variable: keras.Variable, layout: Layout, home: Layout | None
    ) -> None:
        super().__init__(variable, "_value")
        self._layout = layout
        self._home = home

    def refresh(self) -> Any:
        variable = self.variable
        own = internals.array_of(variable)
        if own is None:
            return None
        if self._home is not None:
            own = _strong(take(variable, self._home))
        return self._noted(own, self._layout.widen(self._layout.place(own)))

    def keep(self, array: Any) -> None:
        if self._home is None:
            own = array.addressable_shards[0].data
        else:
            own = self._home.place(self._layout.narrow(array))
        self.attributes["_value"] = own
        self._noted(own, array)

    def _noted(self, own: Any, copy: Any) -> Any:
        # Copies of variables with a home are too large to be kept.
        if self._home is None:
            self.seen, self.array = own, copy
        return copy


class SplitSlot(Slot):
    """A variable of which each replica has a value; read, they are combined."""

    def __init__(self, variable: keras.Variable, layout: Layout) -> None:
        super().__init__(variable, UNCOMBINED)
        self._layout = layout
        self.sharding = layout.cut

    def refresh(self) -> Any:
        variable: Any = self.variable
        if internals.array_of(variable) is None:
            return None
        values = [component.value for component in variable.values]
        self.seen = self.array = join(values, True, self._layout)
        return self.array

    def keep(self, array: Any) -> None:
        if UNCOMBINED not in self.attributes:
            self.attributes[_LAYOUT] = self._layout
            self.attributes["combine"] = combine
        # Last, so that after an interrupt the array is never there without
        # what reads it.
        super().keep(array)


def _strong(array: Any) -> Any:
    # Programs return strong types: a weak one would cause a second trace.
    if not array.weak_type:
        return array
    return lax.convert_element_type(array, array.dtype)


def combine(variable: Any) -> None:
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


class Slots:
    """The slots of one compiler, each kept as long as programs use it."""

    def __init__(self) -> None:
        self._slots: weakref.WeakValueDictionary[Any, Slot] = (
            weakref.WeakValueDictionary()
        )

    def of(self, variable: keras.Variable, layout: Layout | None) -> Slot:
        """Returns a variable's slot, for programs on a layout or one device."""
        owner = vars(variable).get("distribute_strategy")
        key = id(variable), id(layout if owner is None else owner)
        slot = self._slots.get(key)
        if slot is None or slot.attributes is not vars(variable):
            if owner is not None:
                layout = owner.executor.layout
            slot = self._slots[key] = _slot_for(variable, owner, layout)
        return slot


def _slot_for(
    variable: keras.Variable, owner: Any, layout: Layout | None
) -> Slot:
    if shards.is_sharded(variable):
        return ShardedSlot(variable)
    if layout is not None and is_split(variable):
        return SplitSlot(variable, layout)
    if layout is not None and owner is None:
        return CopiedSlot(variable, layout, None)
    if layout is not None and owner.executor.homes is not None:
        home = owner.executor.homes.of(variable)
        return CopiedSlot(variable, layout, home)
    if layout is not None and layout.is_wide:
        return WideSlot(variable, layout)
    return WholeSlot(variable, layout)
