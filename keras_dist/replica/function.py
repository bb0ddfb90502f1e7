"""function: compiles a Python function that uses Keras variables."""

import functools
import weakref
from collections.abc import Callable
from typing import Any
from typing import TypeVar
from typing import overload

import keras
from keras import ops

from keras_dist.core import context
from keras_dist.core.context import inlines
from keras_dist.core.nests import map_nest
from keras_dist.errors import UnsupportedModelError
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.front_end import CompiledFunction
from keras_dist.replica.call import ReplicaCall
from keras_dist.replica.replica_context import get_replica_context
from keras_dist.replica.scopes import values_are_replaced
from keras_dist.replica.state import current_replica

F = TypeVar("F", bound=Callable[..., Any])


class Function(CompiledFunction):
    """A compiled function as its user calls it, of methods too."""

    def __init__(
        self,
        python_function: Callable[..., Any],
        jit_compile: bool | None = None,
        key: object | None = None,
    ) -> None:
        super().__init__(python_function, jit_compile, key)
        # By an instance's id, a weak reference to it and its method's key.
        self._bound: dict[int, tuple[Any, object]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A compiled program uses the variables themselves. It would neither
        # see values that replace them in a scope, nor pass gradients to these.
        if inlines() or values_are_replaced():
            return self.python_function(*args, **kwargs)
        replica = current_replica()
        if isinstance(replica, ReplicaCall):
            compiler = _compiler_of(replica.strategy, self)
            return compiler.call_in_replica(self, replica, args, kwargs)
        if replica is not None:  # a step of `fit`, which is compiled itself
            return self.python_function(*args, **kwargs)
        strategy = context.current_strategy() or context.default_strategy()
        return _compiler_of(strategy, self).call(self, args, kwargs)

    def __get__(
        self, instance: object, owner: type | None = None
    ) -> "Function":
        if instance is None:
            return self
        try:
            key = self._key_of(instance)
        except TypeError as error:
            raise TypeError(
                f"A method of {type(instance).__name__} can't be compiled, "
                "because keras_dist needs a weak reference to the object.\n"
                f"Received: {instance!r}. Expected: an object that can be "
                "weakly referenced. Add '__weakref__' to its `__slots__`, or "
                "compile a plain function."
            ) from error
        method = self.python_function.__get__(instance, owner)
        return Function(method, self.jit_compile, key)

    def _key_of(self, instance: object) -> object:
        entry = self._bound.get(id(instance))
        if entry is None or entry[0]() is not instance:
            # Called with the reference, as the default of `pop`.
            forget = functools.partial(self._bound.pop, id(instance))
            entry = weakref.ref(instance, forget), _Key()
            self._bound[id(instance)] = entry
        return entry[1]

    def __repr__(self) -> str:
        return f"<keras_dist.function {self.name}>"


class _Key:
    """The key in caches of one instance's method."""


def _compiler_of(strategy: Any, function: Function) -> Any:
    compiler = strategy.executor.compiler
    if compiler is None:
        raise UnsupportedModelError(
            f"The backend can't compile functions. Received: {function!r}. "
            "Call the function without `keras_dist.function`, or choose "
            "another backend with KERAS_BACKEND."
        )
    return compiler


@overload
def function(fn: F, *, jit_compile: bool | None = None) -> F: ...


@overload
def function(
    fn: None = None, *, jit_compile: bool | None = None
) -> Callable[[F], F]: ...


def function(fn: object = None, *, jit_compile: bool | None = None) -> Any:
    """Compiles a function that reads and writes Keras variables.

    The result can be called directly, passed to `strategy.run`, called in a
    function that `strategy.run` calls, or call `strategy.run` itself. It is
    compiled as a whole, for all replicas together.

    Arguments that are tensors, arrays or per-replica values are traced. Other
    arguments (numbers, strings, objects) are constants of the compiled
    program: a new value compiles the function anew. Python code runs while the
    function is traced (on JAX twice the first time), not when the compiled
    program is called again.

    Args:
        fn: Callable, which may be a method. Tracing finds the variables that
            it reads, writes or creates in its first call.
        jit_compile: Boolean, or `None` for the backend's default. On JAX,
            `False` runs the function uncompiled. On TensorFlow, as in
            `tf.function`. On PyTorch, `True` uses `torch.compile`; by default
            the function runs uncompiled.

    Returns:
        A callable like `fn`. Without `fn`, a decorator.

    Raises:
        TypeError: If `fn` is not callable.

    Example:

    >>> counter = keras.Variable(0, trainable=False)
    >>> @keras_dist.function
    ... def count(x):
    ...     counter.assign_add(1)
    ...     return 2 * x
    >>> float(count(np.float32(4.0))), int(counter)
    (8.0, 1)
    """
    if fn is None:
        return functools.partial(function, jit_compile=jit_compile)
    if isinstance(fn, Function):
        return fn
    if not callable(fn):
        raise TypeError(
            f"`keras_dist.function` compiles a function. Received: {fn!r} of "
            f"type {type(fn).__name__}. Expected: a callable."
        )
    return Function(fn, jit_compile)


def print(*values: Any, sep: str = " ", end: str = "\n") -> None:
    """Prints values; in a compiled function, each time it runs.

    Python's own `print` runs when a function is traced, and shows tensors
    without values. With several replicas, the output of each begins with
    `replica 0: ` and so on. The order between replicas, and on JAX between
    prints, is not defined.

    Args:
        *values: Tensors, variables, or anything that Python prints, also in
            lists, tuples and dicts.
        sep: String between the values.
        end: String after the last value.

    Example:

    >>> keras_dist.print("loss", 0.5, end=".\\n")
    loss 0.5.
    """
    context = get_replica_context()
    replica = None
    if context is not None and context.num_replicas_in_sync > 1:
        replica = context.replica_id_in_sync_group
    shown = [map_nest(_value, value) for value in values]
    get_backend().print(shown, sep, end, replica)


def _value(leaf: object) -> Any:
    # The value without the framework's variable object and its gradients.
    if isinstance(leaf, keras.Variable):
        return ops.stop_gradient(leaf.value)
    return leaf
