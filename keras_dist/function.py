"""function: compiles a Python function that uses Keras variables."""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any
from typing import TypeVar
from typing import overload

from keras_dist.compilation import inlines
from keras_dist.errors import UnsupportedModelError
from keras_dist.training.call import ReplicaCall
from keras_dist.training.overlay import values_are_replaced
from keras_dist.training.step import current_replica

F = TypeVar("F", bound=Callable[..., Any])


class Function:
    """A compiled function; `keras_dist.function` creates it.

    `key` is its key in caches of compiled programs, which are kept as long as
    the key lives; by default it is the `Function` itself.
    """

    def __init__(
        self,
        python_function: Callable[..., Any],
        jit_compile: bool | None = None,
        key: object | None = None,
    ) -> None:
        functools.update_wrapper(self, python_function)
        self.python_function = python_function
        self.jit_compile = jit_compile
        self.key = self if key is None else key
        # By the id of an instance: a weak reference to it, and its key.
        self._bound: dict[int, tuple[Any, object]] = {}

    @property
    def name(self) -> str:
        """The function's name in messages and profiles."""
        return getattr(self.python_function, "__name__", "function")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A compiled program uses the variables themselves. It would neither
        # see values that replace them in a scope, nor pass gradients to these.
        if inlines() or values_are_replaced():
            return self.python_function(*args, **kwargs)
        replica = current_replica()
        if isinstance(replica, ReplicaCall):
            compiler = replica.strategy.executor.compiler
            assert compiler is not None
            return compiler.call_in_replica(self, replica, args, kwargs)
        if replica is not None:  # a step of `fit`, which is compiled itself
            return self.python_function(*args, **kwargs)
        return _compiler_here(self).call(self, args, kwargs)

    def held_weakly(self) -> Callable[..., Any]:
        """Returns the Python function without a reference to its instance.

        Compilers keep the result; a method must not keep its instance alive.
        """
        if not isinstance(self.python_function, types.MethodType):
            return self.python_function
        method = weakref.WeakMethod(self.python_function)

        def call(*args: Any, **kwargs: Any) -> Any:
            alive = method()
            assert alive is not None  # the caller holds the instance
            return alive(*args, **kwargs)

        return call

    def __get__(self, instance: Any, owner: type | None = None) -> "Function":
        if instance is None:
            return self
        try:
            key = self._key_of(instance)
        except TypeError as error:
            raise TypeError(
                f"A method of {type(instance).__name__} can't be compiled: "
                "what was compiled is kept for each object, weakly. Received: "
                f"{instance!r}. Expected: an object that can be "
                "weakly referenced. Add '__weakref__' to its `__slots__`, or "
                "compile a plain function."
            ) from error
        method = self.python_function.__get__(instance, owner)
        return Function(method, self.jit_compile, key)

    def _key_of(self, instance: Any) -> object:
        found = self._bound.get(id(instance))
        if found is None or found[0]() is not instance:
            forget = functools.partial(_forget, self._bound, id(instance))
            found = weakref.ref(instance, forget), _Key()
            self._bound[id(instance)] = found
        return found[1]

    def __repr__(self) -> str:
        return f"<keras_dist.function {self.name}>"


def _forget(bound: dict[int, Any], key: int, _: object) -> None:
    bound.pop(key, None)


class _Key:
    """The key in caches of one instance's method."""


def _compiler_here(function: Function) -> Any:
    from keras_dist.strategies.default import get_strategy

    compiler = get_strategy().executor.compiler
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


def function(fn: Any = None, *, jit_compile: bool | None = None) -> Any:
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
            "`keras_dist.function` compiles functions. Received: "
            f"{fn!r} of type {type(fn).__name__}. Expected: a callable."
        )
    return Function(fn, jit_compile)
