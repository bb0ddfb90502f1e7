"""A `tf.function` with conversions of its arguments and results."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.errors import ReplicaDivergenceError
from keras_dist.errors import TraceError
from keras_dist.plugins import HOOKS
from keras_dist.plugins import DistributedValues
from keras_dist.plugins import Mirrored
from keras_dist.plugins import PerReplica
from keras_dist.plugins import StepsOfData
from keras_dist.plugins import TraceLog
from keras_dist.plugins import creation_error
from keras_dist.plugins import held_in
from keras_dist.plugins import inlining
from keras_dist.plugins import lend_global_seed
from keras_dist.plugins import map_nest
from keras_dist.plugins import refuse_result
from keras_dist.plugins import refusing_variables
from keras_dist_tensorflow import runtime_internals
from keras_dist_tensorflow.tf_variables import Replacements

MADE_AGAIN = "singleton tf.Variables"
DIVERGED = "Replicas left different values"


class Traced:
    """A function of `args` and `kwargs`, traced once for each signature."""

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        jit_compile: bool | None,
        meets: bool | None = None,
    ) -> None:
        self._name = name
        self._log = TraceLog(name)
        self._fn = fn
        self._jit_compile = jit_compile
        # Whether workers meet in it; `None` before they have compared that.
        self.meets = meets
        self._moves = Replacements.so_far
        # A trace must not create its variable.
        lend_global_seed()
        # True after the first trace that did not fail.
        self._is_traced = False
        self._function = self._new_function()

    @property
    def is_outdated(self) -> bool:
        """True once a variable that a trace has captured was replaced."""
        if self._moves != Replacements.so_far:
            captures = runtime_internals.captures_of(self._function)
            if any(id(handle) in Replacements.gone for handle in captures):
                return True
            self._moves = Replacements.so_far
        return False

    def __call__(self, args: object, kwargs: object) -> Any:
        outputs = self._call("__call__", args, kwargs)
        return map_nest(_opened, outputs)

    def trace(self, args: object, kwargs: object) -> None:
        """Traces the function for these arguments, without a call."""
        self._call("get_concrete_function", args, kwargs)

    def _call(self, method: str, args: object, kwargs: object) -> Any:
        args, kwargs = map_nest(_closed, (args, kwargs))
        try:
            # Each argument costs some of TensorFlow's time.
            arguments = (args, kwargs) if kwargs else (args,)
            outputs = getattr(self._function, method)(*arguments)
        except tf.errors.InvalidArgumentError as error:
            if DIVERGED in error.message:
                raise ReplicaDivergenceError(error.message) from error
            raise
        except Exception as error:
            # After a failed first trace, TensorFlow believes that it created
            # the function's variables: start with a new `tf.function`.
            if not self._is_traced:
                self._function = self._new_function()
            if isinstance(error, tf.errors.OperatorNotAllowedInGraphError):
                raise TraceError(self._of_python(error)) from error
            if MADE_AGAIN in str(error):
                raise creation_error(self._name) from error
            raise
        self._is_traced = True
        return outputs

    def _new_function(self) -> Any:
        def trace(args: object, *keywords: Any) -> Any:
            kwargs = keywords[0] if keywords else {}
            leaves = tf.nest.flatten((args, kwargs), expand_composites=True)
            self._log.note([leaf for leaf in leaves if tf.is_tensor(leaf)])
            refusing = (
                refusing_variables(self._name)
                if self._is_traced
                else contextlib.nullcontext()
            )
            with HOOKS, inlining(), refusing:
                args, kwargs = map_nest(_opened, (args, kwargs))
                return map_nest(_closed_result, self._fn(args, kwargs))

        trace.__name__ = self._name
        return tf.function(
            trace, autograph=False, jit_compile=self._jit_compile
        )

    def _of_python(self, error: Exception) -> str:
        return (
            f"The compiled function '{self._name}' lets Python branch on the "
            "value of a tensor, which is not known while the function is "
            f"traced. Received: {error} Expected: `keras.ops.cond`, "
            "`keras.ops.where`, `keras.ops.while_loop` and similar functions "
            "in place of `if`, `while` and `for`, as on every backend. Or "
            "pass the value as a Python number: the function is compiled "
            "again for each new number."
        )


class _PythonValue:
    """A value that passes a `tf.function` as the structure of a nest."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __tf_flatten__(self) -> tuple[tuple[Any], tuple[()]]:
        return (self.value,), ()

    @classmethod
    def __tf_unflatten__(
        cls, metadata: tuple[Any], _: object
    ) -> "_PythonValue":
        return cls(*metadata)


class _SameVariable:
    """A variable as an argument, compared by identity and not by value."""

    def __init__(self, variable: keras.Variable) -> None:
        self._id = id(variable)
        self.variable = weakref.ref(variable)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _SameVariable)
            and self.variable() is not None
            and self.variable() is other.variable()
        )

    def __hash__(self) -> int:
        return self._id


def _closed(leaf: Any) -> Any:
    if isinstance(leaf, keras.Variable):
        return _PythonValue(_SameVariable(leaf))
    if isinstance(leaf, (np.ndarray, np.generic)):
        return tf.convert_to_tensor(leaf)
    if type(leaf) in (PerReplica, Mirrored) and all(
        _is_number(value) for value in leaf.values
    ):
        return runtime_internals.NativePerReplica(
            [tf.convert_to_tensor(value) for value in leaf.values]
        )
    return leaf


def _is_number(value: object) -> bool:
    if isinstance(value, keras.Variable):
        return False
    return tf.is_tensor(value) or isinstance(
        value, (bool, int, float, complex, np.ndarray, np.generic)
    )


def _closed_result(leaf: object) -> Any:
    """Converts a result to what a `tf.function` can return."""
    if isinstance(leaf, (keras.Variable, np.ndarray, np.generic)):
        return tf.convert_to_tensor(leaf)
    if type(leaf) in (PerReplica, Mirrored):
        return _mapped(_closed_result, leaf)
    if (
        leaf is None
        or tf.is_tensor(leaf)
        or runtime_internals.is_composite(leaf)
    ):
        return leaf
    if any(tf.is_symbolic_tensor(value) for value in held_in(leaf)):
        refuse_result(leaf)
    return _PythonValue(leaf)


def _opened(leaf: object) -> Any:
    if isinstance(leaf, _PythonValue):
        value = leaf.value
        return value.variable() if isinstance(value, _SameVariable) else value
    if type(leaf) in (PerReplica, Mirrored):
        return _mapped(_opened, leaf)
    return leaf


def _mapped(fn: Callable[[Any], Any], leaf: Any) -> Any:
    return type(leaf)([map_nest(fn, value) for value in leaf.values])


def register_values() -> None:
    """Makes our values nests of `tf.nest`, and native ones ours."""
    DistributedValues.register(tf.distribute.DistributedValues)
    PerReplica.register(tf.types.experimental.distributed.PerReplica)
    kinds: tuple[Any, ...] = (PerReplica, Mirrored)
    for kind in kinds:
        # The protocol of `tf.nest` for classes that are no containers.
        kind.__tf_flatten__ = lambda self: (None, self.values)
        kind.__tf_unflatten__ = classmethod(lambda cls, _, values: cls(values))
    runtime_internals.register_loop(StepsOfData)
