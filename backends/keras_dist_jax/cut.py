"""Variables of which each replica keeps one part."""

from typing import Any

import jax
import keras
import numpy as np

from keras_dist.core.plan import Owners
from keras_dist.core.plan import num_bytes
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.layout import Layout
from keras_dist_jax.tracing import eagerly

# Attributes of a variable that is cut: its flat array, and its layout.
STORED = "_keras_dist_cut"
_LAYOUT = "_keras_dist_cut_over"
# The whole value, while only this worker reads and writes it.
_HELD = "_keras_dist_held"
# Set on variables that an optimizer made for one that it updates.
_SLOT = "_keras_dist_is_slot"


class OptimizerSlots(Owners):
    """Owners that mark variables of the same shape as their reference."""

    def keep_together(
        self, variable: keras.Variable, reference: keras.Variable
    ) -> None:
        super().keep_together(variable, reference)
        if variable.shape == reference.shape:
            mark(variable)


def mark(variable: keras.Variable) -> None:
    """Allows a variable to be cut."""
    vars(variable)[_SLOT] = True


def is_marked(variable: keras.Variable) -> bool:
    """Tells whether a variable may be cut."""
    return _SLOT in vars(variable)


class Cut:
    """A variable whose value is a flat array, cut over the replicas.

    The elements are in their order, with zeros behind them so that all parts
    have one size. Reading the variable makes the whole value, which is not
    kept; on several workers that takes a collective of all. Nothing else about
    the variable changes.
    """

    @property
    def _value(self) -> Any:
        held = vars(self).get(_HELD)
        if held is not None:
            return _placed(self, held)
        array = vars(self)[STORED]
        return None if array is None else whole(self, array)

    @_value.setter
    def _value(self, value: Any) -> None:
        attributes = vars(self)
        if value is None:
            attributes[STORED] = None
        elif attributes.get(_HELD) is not None:
            attributes[_HELD] = np.array(value)
        else:
            attributes[STORED] = flat_of(self, value)


_classes: dict[type, type] = {}


def is_cut(variable: keras.Variable) -> bool:
    """Tells whether each replica keeps a part of a variable."""
    return isinstance(variable, Cut)


def stored(variable: keras.Variable) -> Any:
    """Returns the flat `jax.Array` of a variable that is cut, or `None`."""
    return vars(variable)[STORED]


def bytes_of_part(variable: keras.Variable) -> int:
    """Returns the bytes that each device keeps of a variable that is cut."""
    count = layout_of(variable).num_replicas
    elements = int(np.prod(variable.shape, dtype=np.int64))
    return -(-elements // count) * num_bytes(variable) // max(elements, 1)


def layout_of(variable: Any) -> Layout:
    """Returns the layout that a variable is cut over."""
    layout: Layout = vars(variable)[_LAYOUT]
    return layout


def cut(variable: keras.Variable, layout: Layout) -> None:
    """Leaves each replica its part of a variable; idempotent and cheap.

    A variable without a value is left alone.
    """
    value = None if is_cut(variable) else internals.array_of(variable)
    if value is None or isinstance(value, jax.core.Tracer):
        return
    with eagerly():
        flat = _cut(value, layout)
    kind = type(variable)
    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (Cut, kind), {})
    attributes = vars(variable)
    attributes[_LAYOUT], attributes[STORED] = layout, flat
    variable.__class__ = _classes[kind]
    del attributes["_value"]


def give_back(variable: keras.Variable, flat: Any) -> None:
    """Undoes `keras_internals.take_away` on a variable that is cut.

    The new flat array is a `jax.Array`, or a NumPy array of this worker's
    parts.
    """
    if not isinstance(flat, jax.Array):
        flat = layout_of(variable).cut_up_own(flat)
    internals.give_back(variable, None)
    vars(variable)[STORED] = flat


def whole(variable: Any, array: Any) -> Any:
    """Makes a variable's value from its flat array."""
    return _placed(variable, on_host(variable, array))


def on_host(variable: Any, array: Any) -> np.ndarray[Any, Any]:
    """Makes a variable's value from its flat array, in host memory."""
    rows = layout_of(variable).all_rows(array)
    size = int(np.prod(variable.shape, dtype=np.int64))
    return rows[:size].reshape(variable.shape)


def flat_of(variable: Any, value: Any) -> Any:
    """Makes a variable's flat array from its value."""
    return _cut(value, layout_of(variable))


def empty_like(variable: keras.Variable) -> np.ndarray[Any, Any]:
    """Makes an array of a variable's shape and dtype, in host memory.

    Its elements are arbitrary.
    """
    return np.empty(variable.shape, stored(variable).dtype)


def hold(variable: keras.Variable, value: Any) -> None:
    """Lets this worker use a whole value of its own, until `let_go`."""
    vars(variable)[_HELD] = value


def let_go(variable: keras.Variable) -> Any:
    """Undoes `hold`; returns the value as it was last, or `None`."""
    return vars(variable).pop(_HELD, None)


def _cut(value: Any, layout: Layout) -> Any:
    return layout.cut_up(np.ravel(np.asarray(value)))


def _placed(variable: Any, value: Any) -> Any:
    # The variable may be read while a function is traced.
    with eagerly():
        return layout_of(variable).place(value)
