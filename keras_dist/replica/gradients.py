"""Gradients with respect to Keras variables and tensors, on each backend."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist.plugin.backend import get_backend
from keras_dist.replica.differentiation import Differentiates
from keras_dist.replica.differentiation import differentiating


def value_and_grad(
    fn: Callable[..., Any], variables: Any, has_aux: bool = False
) -> tuple[Any, Any]:
    """Calls a function, and differentiates what it returns.

    `fn` reads variables as ever. What it assigns (metrics, moving statistics,
    seeds) is kept, once. It may call `value_and_grad` itself. A
    `keras_dist.function` that it calls is part of it, and not compiled on its
    own: compile what calls `value_and_grad`.

    Args:
        fn: Callable that returns a float scalar. It is called at once, with
            the tensors in `variables` as positional arguments.
        variables: What to differentiate by: a `keras.Variable` or a float
            tensor, array or number, or a list or tuple of them.
        has_aux: Boolean, whether `fn` returns a tuple of the scalar and
            anything else, which is returned as it is.

    Returns:
        Tuple `(value, gradients)`, with `has_aux` `((value, aux), gradients)`.
        Gradients are a list, for a single variable just its own: a tensor of
        its shape, or `None` if `fn` does not use the variable. On JAX, what
        is read and makes no difference has a gradient of zeros instead, and
        so have tensors. On TensorFlow, variables of which only rows were read
        may have a `tf.IndexedSlices`, which optimizers take.

    Raises:
        ValueError: If there is nothing to differentiate by, if that is not of
            a float dtype, or if `fn` returns something else.
        TypeError: If it is neither variable nor tensor, or if the backend
            can't differentiate.
        UnsupportedModelError: If `fn` calls `strategy.run` of several
            replicas, which no gradient from outside reaches.

    Example:

    >>> v = keras.Variable(3.0)
    >>> value, gradient = keras_dist.value_and_grad(lambda: v * v, v)
    >>> float(value), float(gradient)
    (9.0, 6.0)
    >>> gradients = keras_dist.gradient(lambda x, y: x * y, [2.0, 5.0])
    >>> [float(g) for g in gradients]
    [5.0, 2.0]
    """
    value, aux, gradients = _differentiate(fn, variables, has_aux)
    return ((value, aux) if has_aux else value), gradients


def gradient(
    fn: Callable[..., Any], variables: Any, has_aux: bool = False
) -> Any:
    """The gradients of a function: `value_and_grad` without the value.

    Args:
        fn: Callable that returns a float scalar. It is called at once, with
            the tensors in `variables` as positional arguments.
        variables: What to differentiate by: a `keras.Variable` or a float
            tensor, array or number, or a list or tuple of them.
        has_aux: Boolean, whether `fn` returns a tuple of the scalar and
            anything else, which is returned as it is.

    Returns:
        The gradients as `value_and_grad` gives them; with `has_aux` a tuple
        `(gradients, aux)`.

    Raises:
        ValueError: As `value_and_grad` does.
        TypeError: As `value_and_grad` does.

    Example:

    The second derivative of a cube:

    >>> def slope(x):
    ...     return keras_dist.gradient(lambda x: x**3, x)
    >>> float(keras_dist.gradient(slope, 2.0))
    12.0
    """
    _, aux, gradients = _differentiate(fn, variables, has_aux)
    return (gradients, aux) if has_aux else gradients


def _differentiate(
    fn: Callable[..., Any], variables: Any, has_aux: bool
) -> tuple[Any, Any, Any]:
    is_list = isinstance(variables, (list, tuple))
    sources = [
        source if isinstance(source, keras.Variable) else _tensor(source)
        for source in (variables if is_list else [variables])
    ]
    if not sources:
        raise ValueError(
            "There is nothing to differentiate by. Received: "
            f"variables={variables!r}. Expected: at least one variable or "
            "tensor. If these are `model.trainable_variables`, the model is "
            "probably not built yet: build it first, with "
            "`model.build(input_shape)` or by calling it on a batch, and read "
            "`trainable_variables` after that."
        )
    for source in sources:
        _check_float(source)
    # Each variable once, or its gradient might be split over its mentions.
    of_variables = {id(s): s for s in sources if isinstance(s, keras.Variable)}
    tensors = [s for s in sources if not isinstance(s, keras.Variable)]

    def checked(*args: Any) -> tuple[Any, Any]:
        with differentiating():
            return _value_and_aux(fn(*args), has_aux)

    value, aux, found = _backend().differentiate(
        checked, list(of_variables.values()), tensors
    )
    by_variable = dict(zip(of_variables, found, strict=False))
    by_tensor = iter(found[len(of_variables) :])
    gradients = [
        by_variable[id(source)]
        if isinstance(source, keras.Variable)
        else next(by_tensor)
        for source in sources
    ]
    return value, aux, gradients if is_list else gradients[0]


def _backend() -> Differentiates:
    backend = get_backend()
    if not isinstance(backend, Differentiates):
        raise TypeError(
            f"The backend {type(backend).__name__} cannot differentiate. "
            "Expected: a backend that is a `Differentiates` too, as those of "
            "JAX, TensorFlow and PyTorch are. Choose one with KERAS_BACKEND."
        )
    return backend


def _tensor(source: Any) -> Any:
    if isinstance(source, (int, float)) and not isinstance(source, bool):
        return ops.convert_to_tensor(source, dtype=keras.config.floatx())
    if isinstance(source, (np.ndarray, np.generic)) or keras.ops.is_tensor(
        source
    ):
        return ops.convert_to_tensor(source)
    raise TypeError(
        f"Can't differentiate by {source!r} of type {type(source).__name__}. "
        "Expected: a `keras.Variable`, a tensor, an array or a number, or a "
        "flat list of them. Give the list of a model's variables as "
        "`model.trainable_variables`, and flatten nests with "
        "`keras.tree.flatten`."
    )


def _check_float(source: Any) -> None:
    dtype = keras.backend.standardize_dtype(source.dtype)
    if not keras.backend.is_float_dtype(dtype):
        what = getattr(source, "path", None)
        raise ValueError(
            "Only floats have gradients. Received: "
            + (f"variable '{what}'" if what else "a tensor")
            + f" of dtype '{dtype}'. Expected: a float dtype. Cast it, or "
            "leave it out of `variables`."
        )


def _value_and_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    aux = None
    if has_aux:
        if not isinstance(result, (list, tuple)) or len(result) != 2:
            raise ValueError(
                "With has_aux=True the function has to return a tuple of two, "
                f"the value and anything else. Received: {result!r}. Return "
                "`(loss, aux)`, or leave has_aux out."
            )
        result, aux = result
    return _scalar(result), aux


def _scalar(value: Any) -> Any:
    if isinstance(value, keras.Variable):
        value = value.value
    elif isinstance(value, float):
        value = ops.convert_to_tensor(value, dtype=keras.config.floatx())
    elif isinstance(value, (np.ndarray, np.generic)):
        value = ops.convert_to_tensor(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        raise ValueError(
            "The function has to return a float scalar to differentiate. "
            f"Received: {value!r} of type {type(value).__name__}. Return the "
            "loss, and anything else beside it with has_aux=True."
        )
    name = keras.backend.standardize_dtype(dtype)
    if len(shape) or not keras.backend.is_float_dtype(name):
        raise ValueError(
            "The function has to return a float scalar to differentiate. "
            f"Received: a tensor of shape {tuple(shape)} and dtype '{name}'. "
            "Reduce it, for instance with keras_dist.compute_average_loss."
        )
    return value
