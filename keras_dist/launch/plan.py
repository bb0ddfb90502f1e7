"""`keras-dist plan --model`, once the backend is chosen."""

import contextlib
import functools
import importlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras

from keras_dist.summaries.counting import check_built
from keras_dist.summaries.counting import load_of
from keras_dist.training import keras_internals
from keras_dist.training.elementwise import check_optimizer
from keras_dist_cli.planning.load import Load


def load_of_named(
    name: str, optimizer: str | None = None, is_sharded: bool = False
) -> tuple[Load, str]:
    """What a function's model and its optimizer take.

    Variables are made without values, so that there may be more of them than
    fit here.

    Args:
        name: String, `"module:function"`.
        optimizer: String, Keras' name of an optimizer in place of the one
            that the model is compiled with; `None` for that one, else Adam.
        is_sharded: Boolean, whether replicas are to share its state.

    Returns:
        Tuple of the `Load`, and what it is in words.

    Raises:
        ValueError: If there is no such function, model or optimizer.
        UnsupportedModelError: If the optimizer's state can't be shared.
    """
    # What Keras has still to give a value is forgotten with the thread.
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(_load_of, name, optimizer, is_sharded).result()


def _load_of(
    name: str, optimizer: str | None, is_sharded: bool
) -> tuple[Load, str]:
    fn = _function(name)
    with _without_values():
        model = fn()
        check_built(model)
        used = _optimizer(model, optimizer)
        if is_sharded:
            check_optimizer(used)
        if not used.built:
            trained = model.trainable_variables
            keras_internals.build_without_values(used, trained)
        load = load_of(model, used)
        count = sum(math.prod(v.shape) for v in model.trainable_variables)
    dtypes = sorted({v.dtype for v in model.trainable_variables})
    return load, (
        f"{name}, {count:,} trainable parameters, {' and '.join(dtypes)}, "
        f"{used.name}"
    )


@contextlib.contextmanager
def _without_values() -> Iterator[None]:
    """Inside, variables are made that have a shape and a type alone.

    A stateless scope does that to those that have an initializer; those that
    are given a value get one that returns it.
    """
    original = keras.Variable.__init__

    @functools.wraps(original)
    def __init__(
        self: Any,
        initializer: Any,
        shape: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        if not callable(initializer) and not isinstance(initializer, str):
            value = keras.ops.convert_to_tensor(initializer, dtype=dtype)
            initializer = _Constant(value)
            shape = tuple(value.shape)
            dtype = keras.backend.standardize_dtype(value.dtype)
        original(self, initializer, shape=shape, dtype=dtype, **kwargs)

    keras.Variable.__init__ = __init__
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        keras.Variable.__init__ = original


class _Constant:
    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        return self._value


def _function(name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(
            "--model names a function that returns a model. Received: "
            f"{name!r}. Expected: module:function, such as "
            "my_package.models:build."
        )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"--model {name}: there is no module '{error.name}'. Start the "
            "command where Python finds it, or set PYTHONPATH."
        ) from error
    fn = getattr(found, attribute, None)
    if not callable(fn):
        raise ValueError(
            f"--model {name}: '{module}' has no function '{attribute}'."
        )
    return fn


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
