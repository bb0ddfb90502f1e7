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
    """Calls a function and computes the gradients of its result.

    `fn` reads variables as usual, and each of its assignments (to metrics,
    moving statistics, seeds) takes effect once. It may call `value_and_grad`
    itself. A `keras_dist.function` that it calls is not compiled on its own:
    compile the function that calls `value_and_grad`.

    Args:
        fn: Callable that returns a float scalar. It is called at once, with
            the tensors in `variables` as positional arguments.
        variables: `keras.Variable`, or float tensor, array or number, to
            differentiate with respect to; or a list or tuple of them.
        has_aux: Boolean, true if `fn` returns a tuple of the scalar and any
            other object, which is returned as it is.

    Returns:
        Tuple `(value, gradients)`, with `has_aux` `((value, aux), gradients)`.
        Gradients are a list like `variables`, or, for a single variable, its
        gradient: a tensor of its shape, or `None` if `fn` does not use the
        variable. On JAX, the gradient is zeros instead of `None` for tensors,
        and for a variable that is read without effect on the value. On
        TensorFlow, a variable of which only rows are read may have a
        `tf.IndexedSlices`, which optimizers accept.

    Raises:
        ValueError: If `variables` is empty or has a dtype that is no float, or
            if `fn` returns something else than a float scalar.
        TypeError: If `variables` has something else than variables and
            tensors, or if the backend can't differentiate.
        UnsupportedModelError: If `fn` calls `strategy.run` of several
            replicas, through which gradients can't flow.

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
    """Computes the gradients of a function, like `value_and_grad`.

    Args:
        fn: Callable that returns a float scalar. It is called at once, with
            the tensors in `variables` as positional arguments.
        variables: `keras.Variable`, or float tensor, array or number, to
            differentiate with respect to; or a list or tuple of them.
        has_aux: Boolean, true if `fn` returns a tuple of the scalar and any
            other object, which is returned as it is.

    Returns:
        The gradients as `value_and_grad` returns them; with `has_aux` a tuple
        `(gradients, aux)`.

    Raises:
        ValueError: As for `value_and_grad`.
        TypeError: As for `value_and_grad`.

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
    # Each variable once: a backend might split the gradient of a variable
    # that is listed several times.
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
