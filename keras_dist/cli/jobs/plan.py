"""The part of `keras-dist plan --model` that uses Keras."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist.internals import keras_internals
from keras_dist.internals import keras_optimizers
from keras_dist.planning.estimates import Load
from keras_dist.sharding.supported import check_optimizer
from keras_dist.tools.counting import check_built
from keras_dist.tools.counting import load_of
from keras_dist.tools.users_function import called
from keras_dist.tools.users_function import function_of


def load_of_named(
    name: str, optimizer: str | None = None, is_sharded: bool = False
) -> tuple[Load, str]:
    """Returns the load of a user's model and optimizer, with a description.

    Variables get no values, so the model may be larger than the memory here.
    """
    function = function_of(name)
    with without_values():
        model = called(name, function)
        # `keras-dist bench fit --model` takes functions that return data too.
        if isinstance(model, tuple) and model:
            model = model[0]
        check_built(model)
        used = _optimizer(model, optimizer)
        if is_sharded:
            check_optimizer(used)
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
    original = keras.Variable.__init__

    @functools.wraps(original)
    def __init__(
        self: Any,
        initializer: Any,
        shape: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        # The scope below does so only to variables with an initializer.
        if not callable(initializer) and not isinstance(initializer, str):
            value = keras.ops.convert_to_tensor(initializer, dtype=dtype)

            def initializer(shape: Any, dtype: Any = None) -> Any:
                return value

            shape = tuple(value.shape)
            dtype = keras.backend.standardize_dtype(value.dtype)
        original(self, initializer, shape=shape, dtype=dtype, **kwargs)

    keras.Variable.__init__ = __init__
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        keras.Variable.__init__ = original
        keras_internals.set_uninitialized(before)


def _optimizer(model: keras.Model, name: str | None) -> Any:
    own = getattr(model, "optimizer", None)
    if name is None and own is not None:
        return own
    try:
        return keras.optimizers.get(name or "adam")
    except ValueError as error:
        raise ValueError(
            f"Keras has no optimizer of that name. Received: {name!r}. "
            "Expected: one such as adam, or none, for the model's own."
        ) from error
