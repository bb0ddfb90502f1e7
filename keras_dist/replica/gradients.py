"""Gradients with respect to Keras variables and tensors, on each backend."""

import functools
import threading
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from keras import tree

from keras_dist.core.context import replaced
from keras_dist.core.rows import scaled
from keras_dist.errors import UnsupportedModelError
from keras_dist.plugin.backend import get_backend
from keras_dist.replica.scopes import values_are_replaced
from keras_dist.replica.state import current_step

# The value, the function's other result, and the gradients: first those of the
# variables, then those of the tensors.
Differentiated = tuple[Any, Any, list[Any]]


class Differentiates(ABC):
    """A `Backend` that can differentiate functions of Keras variables."""

    @abstractmethod
    def differentiate(
        self,
        fn: Callable[..., tuple[Any, Any]],
        variables: Sequence[keras.Variable],
        tensors: Sequence[Any],
    ) -> Differentiated:
        """Calls `fn(*tensors)` once, and differentiates its first result.

        Values that `fn` assigns to variables are in place when this returns.

        Args:
            fn: Callable. Returns a tuple of a float scalar and anything.
            variables: Sequence of different float variables.
            tensors: Sequence of float tensors.

        Returns:
            Tuple of the scalar, the other result of `fn`, and a list of
            gradients, those of the variables first: `None` for each that `fn`
            did not use.
        """


class _Differentiation(threading.local):
    """The number of functions around this code that are differentiated."""

    def __init__(self) -> None:
        self.depth = 0


# An attribute and no function, because each `strategy.run` looks at it.
current = _Differentiation()


def check_run_counts(strategy: Any) -> None:
    """Refuses `strategy.run` where no derivative would reach replicas."""
    if current.depth:
        raise UnsupportedModelError(
            "`strategy.run` was called in a function that is being "
            "differentiated, but gradients do not pass through `run`.\n"
            f"Received: {strategy!r}, with {strategy.num_replicas_in_sync} "
            "replicas. Expected: `keras_dist.gradient` or `value_and_grad` "
            "on each replica, in the function that `strategy.run` calls. Sum "
            "the gradients after that: `strategy.reduce('SUM', "
            "strategy.run(lambda: keras_dist.gradient(loss_fn, variables)), "
            "axis=None)`. Or call `optimizer.apply` in the replica function."
        )
    if values_are_replaced():
        raise UnsupportedModelError(
            "`strategy.run` was called in a `keras.StatelessScope`, but "
            "replicas do not see the values in this scope.\nReceived: "
            f"{strategy!r}, with {strategy.num_replicas_in_sync} replicas. "
            "Expected: no scope around `run`. Open the scope on each "
            "replica, in the function that `strategy.run` calls."
        )


def value_and_grad(
    fn: Callable[..., Any], variables: object, has_aux: bool = False
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
    fn: Callable[..., Any], variables: object, has_aux: bool = False
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
            "There is nothing to differentiate with respect to.\nReceived: "
            f"variables={variables!r}. Expected: at least one variable or "
            "tensor. If these are `model.trainable_variables`, the model is "
            "probably not built yet. Build it first, with "
            "`model.build(input_shape)` or by calling it on a batch, and "
            "read `trainable_variables` after that."
        )
    for source in sources:
        _check_float(source)
    # Each variable once: a backend might split the gradient of a variable
    # that is listed several times.
    of_variables = {id(s): s for s in sources if isinstance(s, keras.Variable)}
    tensors = [s for s in sources if not isinstance(s, keras.Variable)]

    def checked(*args: Any) -> tuple[Any, Any]:
        with replaced(current, depth=current.depth + 1):
            return _value_and_aux(fn(*args), has_aux)

    value, aux, flat_gradients = _backend().differentiate(
        checked, list(of_variables.values()), tensors
    )
    by_variable = dict(zip(of_variables, flat_gradients, strict=False))
    by_tensor = iter(flat_gradients[len(of_variables) :])
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
            "Expected: a backend that is also a `Differentiates`, as those "
            "of JAX, TensorFlow and PyTorch are. Choose one with "
            "KERAS_BACKEND."
        )
    return backend


def _tensor(source: object) -> Any:
    if isinstance(source, (int, float)) and not isinstance(source, bool):
        return ops.convert_to_tensor(source, dtype=keras.config.floatx())
    if isinstance(source, (np.ndarray, np.generic)) or keras.ops.is_tensor(
        source
    ):
        return ops.convert_to_tensor(source)
    raise TypeError(
        f"Can't differentiate with respect to {source!r} of type "
        f"{type(source).__name__}. Expected: a `keras.Variable`, a tensor, an "
        "array or a number, or a flat list of them. Pass a model's variables "
        "as `model.trainable_variables`, and flatten nests with "
        "`keras.tree.flatten`."
    )


def _check_float(source: Any) -> None:
    dtype = keras.backend.standardize_dtype(source.dtype)
    if not keras.backend.is_float_dtype(dtype):
        what = getattr(source, "path", None)
        raise ValueError(
            "Only floats have gradients.\nReceived: "
            + (f"variable '{what}'" if what else "a tensor")
            + f" of dtype '{dtype}'. Expected: a float dtype. Cast it, or "
            "leave it out of `variables`."
        )


def _value_and_aux(result: object, has_aux: bool) -> tuple[Any, Any]:
    aux = None
    if has_aux:
        if not isinstance(result, (list, tuple)) or len(result) != 2:
            raise ValueError(
                "With has_aux=True the function has to return a tuple of "
                f"two: the value, and anything else. Received: {result!r}. "
                "Return `(loss, aux)`, or leave out has_aux."
            )
        result, aux = result
    return _scalar(result), aux


def _scalar(value: object) -> Any:
    if isinstance(value, keras.Variable):
        value = value.value
    elif isinstance(value, float):
        value = ops.convert_to_tensor(value, dtype=keras.config.floatx())
    elif isinstance(value, (np.ndarray, np.generic)):
        value = ops.convert_to_tensor(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    received = f"{value!r} of type {type(value).__name__}"
    if shape is not None and dtype is not None:
        name = keras.backend.standardize_dtype(dtype)
        if not len(shape) and keras.backend.is_float_dtype(name):
            return value
        received = f"a tensor of shape {tuple(shape)} and dtype '{name}'"
    raise ValueError(
        "The function has to return a float scalar to differentiate.\n"
        f"Received: {received}. Return the loss, reduced for instance with "
        "keras_dist.compute_average_loss. To return anything else too, use "
        "has_aux=True."
    )


def with_weighed_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with a gradient of its own, as a step has to call it.

    The gradient that the user's code sees is that of one device.
    """
    step = current_step()
    is_ours = (getattr(f, "__module__", None) or "").startswith("keras_dist")
    # keras_dist's own are linear. A compiled step weighs its loss instead.
    if step is None or is_ours or step.is_compiled:
        return f
    weight, inverse = step.share.weight, step.share.inverse
    if isinstance(weight, float) and weight == 1.0:
        return f

    @functools.wraps(f)
    def forward(*args: Any, **kwargs: Any) -> Any:
        result = f(*args, **kwargs)
        if not isinstance(result, tuple) or len(result) != 2:
            return result
        outputs, backward = result
        return outputs, _of_one_device(backward, weight, inverse)

    return forward


def _of_one_device(
    backward: Callable[..., Any], weight: object, inverse: object
) -> Callable[..., Any]:
    @functools.wraps(backward)
    def weighed(*args: Any, **kwargs: Any) -> Any:
        # PyTorch passes gradients by name, after the inputs.
        if "upstream" in kwargs:
            kwargs["upstream"] = _scaled(kwargs["upstream"], weight)
        else:
            args = tuple(_scaled(argument, weight) for argument in args)
        return _scaled(backward(*args, **kwargs), inverse)

    return weighed


def _scaled(nest: Any, factor: Any) -> Any:
    def one(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        if hasattr(leaf, "dense_shape"):  # a sparse gradient
            values = scaled(leaf.values, factor)
            return type(leaf)(values, leaf.indices, leaf.dense_shape)
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        return scaled(leaf, factor) if "float" in dtype else leaf

    return tree.map_structure(one, nest)
