"""The part of `keras-dist plan --model` that uses Keras."""

import contextlib
import functools
import math
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_dist.core.context import replaced
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_optimizers
from keras_dist.internals.hooks import Hook
from keras_dist.internals.hooks import Hooks
from keras_dist.internals.hooks import as_hook
from keras_dist.planning.estimates import SLOTS_SPLIT
from keras_dist.planning.estimates import Load
from keras_dist.plugin.capabilities import check_state_shards
from keras_dist.tools.counting import check_built
from keras_dist.tools.counting import load_of
from keras_dist.tools.users_function import called
from keras_dist.tools.users_function import function_of

_ROWS = 1  # of a batch that builds a model


def load_of_named(
    name: str, optimizer: str | None = None, split: str | None = None
) -> tuple[Load, str]:
    """Returns the load of a user's model and optimizer, with a description.

    Variables get no values, so the model may be larger than the memory here.
    """
    function = function_of(name)
    with without_values():
        model = called(name, function)
        # `keras-dist bench --model` takes functions that return data too.
        if isinstance(model, tuple) and model:
            model, *data = model
            if data and isinstance(model, keras.Model) and not model.built:
                x = like_data(name, "x", _ROWS, data[0])
                call = functools.partial(model, x)
                called(name, call, "the model, called on `x`,")
        check_built(model)
        used = _optimizer(model, optimizer)
        if split == SLOTS_SPLIT:
            check_state_shards(used)
        if not used.built:
            trained = model.trainable_variables
            keras_optimizers.build_without_values(used, trained)
        load = load_of(model, used)
        count = sum(math.prod(v.shape) for v in model.trainable_variables)
    dtypes = sorted({v.dtype for v in model.trainable_variables})
    return load, (
        f"{name}, {count:,} trainable parameters, {' and '.join(dtypes)}, "
        f"{used.name}"
    )


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Makes variables with a shape and a dtype only, inside of the context."""
    before = keras_internals.set_uninitialized([])
    try:
        scope = keras.StatelessScope(initialize_variables=False)
        with _hooks, replaced(_making, has_no_values=True), scope:
            yield
    finally:
        keras_internals.set_uninitialized(before)


class _Making(threading.local):
    def __init__(self) -> None:
        self.has_no_values = False


_making = _Making()


@as_hook
def _hook_variable(
    original: Any,
    self: Any,
    initializer: Any,
    shape: Any = None,
    dtype: Any = None,
    **kwargs: Any,
) -> None:
    is_value = not callable(initializer) and not isinstance(initializer, str)
    # The scope above does so only to variables with an initializer.
    if is_value and _making.has_no_values:
        value = keras.ops.convert_to_tensor(initializer, dtype=dtype)

        def initializer(shape: object, dtype: object = None) -> Any:
            return value

        shape = tuple(value.shape)
        dtype = keras.backend.standardize_dtype(value.dtype)
    original(self, initializer, shape=shape, dtype=dtype, **kwargs)


def _table() -> Iterator[Hook]:
    why = "a variable that is given its value needs no memory for it either"
    yield Hook(keras.Variable, "__init__", _hook_variable, why)


_hooks = Hooks(_table)


def _optimizer(model: keras.Model, name: str | None) -> Any:
    optimizer = getattr(model, "optimizer", None)
    if name is None and optimizer is not None:
        return optimizer
    try:
        return keras.optimizers.get(name or "adam")
    except ValueError as error:
        raise ValueError(
            f"Keras has no optimizer of that name. Received: {name!r}. "
            "Expected: one such as adam, or none, for the model's own."
        ) from error


def kind_of(value: object) -> str:
    """Describes an object that the user's function returned."""
    if isinstance(value, keras.Model):
        is_ready = getattr(value, "optimizer", None) is not None
        return "a model" if is_ready else "a model without an optimizer"
    return f"an object of type {type(value).__name__}"


def like_data(spec: str, name: str, rows: int, data: object) -> Any:
    """Describes a batch of rows like those of the user's data."""
    leaves = keras.tree.flatten(data) if data is not None else []
    shapes = [getattr(leaf, "shape", None) for leaf in leaves]
    dtypes = [str(getattr(leaf, "dtype", "")) for leaf in leaves]
    if not leaves or not all(shapes) or not all(map(is_numeric, dtypes)):
        kinds = ", ".join(sorted({*map(kind_of, leaves)})) or "nothing"
        raise ValueError(
            f"--model {spec}: `{name}` can't be read as a batch. Received: "
            f"{kinds}. Expected: arrays of numbers with rows, or lists, "
            "tuples or dicts of them."
        )
    return keras.tree.map_structure(lambda leaf: rows_like(leaf, rows), data)


def is_numeric(dtype: str) -> bool:
    """Tells whether Keras knows a dtype of this name, for numbers."""
    try:
        return bool(keras.backend.standardize_dtype(dtype) != "string")
    except (TypeError, ValueError):
        return False


def rows_like(array: Any, rows: int) -> keras.KerasTensor:
    """Describes rows like those of an array or a tensor, as `fit` has them."""
    dtype = keras.backend.standardize_dtype(array.dtype)
    if isinstance(array, np.ndarray) and dtype == "float64":
        dtype = keras.config.floatx()
    # JAX has no other integers unless it is told so.
    dtype = {"int64": "int32", "uint64": "uint32"}.get(dtype, dtype)
    return keras.KerasTensor((rows, *array.shape[1:]), dtype)
