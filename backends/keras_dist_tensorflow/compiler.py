"""Compiled functions on TensorFlow: one `tf.function` around each."""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist.core.context import check_cross_replica
from keras_dist.core.context import in_replica_function
from keras_dist.plugin.compiler import Compiler
from keras_dist.plugin.compiler import check_arguments
from keras_dist.plugin.front_end import CallOfReplica
from keras_dist.plugin.front_end import CompiledFunction
from keras_dist.plugin.front_end import RunsReplicas
from keras_dist_tensorflow import runtime_internals
from keras_dist_tensorflow.atomic import install_building
from keras_dist_tensorflow.loops import loop_of
from keras_dist_tensorflow.loops import stacked
from keras_dist_tensorflow.traced import Traced
from keras_dist_tensorflow.workers import TensorFlowWorkers

_Named = Mapping[str, Any] | None


class TensorFlowCompiler(Compiler):
    """Keeps the `tf.function`s of each function while the function lives.

    Attributes:
        scope: Callable that gives a context manager, entered around calls.
    """

    def __init__(
        self,
        num_replicas: int,
        workers: TensorFlowWorkers | None = None,
        is_one_device: bool = True,
    ) -> None:
        install_building()
        self._num_replicas = num_replicas
        self._is_one_device = is_one_device
        self.workers = workers
        self.scope: Callable[[], contextlib.AbstractContextManager[Any]] = (
            contextlib.nullcontext
        )
        self._kept: weakref.WeakKeyDictionary[object, dict[Any, Traced]] = (
            weakref.WeakKeyDictionary()
        )

    def call(
        self,
        function: CompiledFunction,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if not tf.executing_eagerly():  # inlined into the outer trace
            return function.python_function(*args, **kwargs)

        def make(python_function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda args, kwargs: python_function(*args, **kwargs)

        # The function may ask whether it is in replica context: each context
        # has a trace of its own.
        kind = ("call", in_replica_function())
        return self._traced(function, kind, make)(args, kwargs)

    def call_in_replica(
        self,
        function: CompiledFunction,
        call: CallOfReplica,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if (
            runtime_internals.is_recording()
            or runtime_internals.is_computed_again()
        ):
            # A tape cannot follow gradients through a `tf.function` to the
            # all-reduces between replicas.
            return function.python_function(*args, **kwargs)
        return super().call_in_replica(function, call, args, kwargs)

    def run(
        self,
        strategy: RunsReplicas,
        fn: "CompiledFunction | Callable[..., Any]",
        args: Sequence[Any],
        kwargs: _Named,
    ) -> Any:
        if not isinstance(fn, CompiledFunction):
            return strategy.run_uncompiled(fn, args, kwargs)
        check_cross_replica(strategy, "run")
        if not tf.executing_eagerly():
            return strategy.run_uncompiled(fn.python_function, args, kwargs)

        def make(python_function: Callable[..., Any]) -> Callable[..., Any]:
            return functools.partial(strategy.run_uncompiled, python_function)

        return self._traced(fn, ("run",), make)(args, kwargs or {})

    def scan(
        self,
        strategy: RunsReplicas,
        function: CompiledFunction,
        batches: Sequence[tuple[Any, ...]],
    ) -> Any:
        check_cross_replica(strategy, "run")
        args = stacked(batches) if tf.executing_eagerly() else None
        if args is None:
            return super().scan(strategy, function, batches)

        def make(python_function: Callable[..., Any]) -> Callable[..., Any]:
            return loop_of(strategy, python_function, len(batches))

        return self._traced(function, ("scan", len(batches)), make)(args, {})

    def _traced(
        self,
        function: CompiledFunction,
        kind: Any,
        make: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> Callable[[Any, Any], Any]:
        kept = self._kept.setdefault(function.key, {})
        traced = kept.get(kind)
        if traced is None or traced.is_outdated:
            traced = Traced(
                function.name,
                make(function.held_weakly()),
                self._jit_compile(function),
            )
            kept[kind] = traced

        def call(args: Any, kwargs: Any) -> Any:
            check_arguments(function, args, kwargs)
            # Without the scope, results are copied to the default device.
            with self._explaining(), self.scope():
                return traced(args, kwargs)

        return call

    def _explaining(self) -> contextlib.AbstractContextManager[None]:
        if self.workers is None:
            return contextlib.nullcontext()
        return self.workers.explaining()

    def _jit_compile(self, function: CompiledFunction) -> bool | None:
        if not function.jit_compile or self._is_one_device:
            return function.jit_compile
        warnings.warn(
            "XLA compilation is off: TensorFlow can't compile a function for "
            f"several devices. Received: jit_compile=True for {function!r} on "
            f"{self._num_replicas} replicas. Leave `jit_compile` out to "
            "silence this.",
            stacklevel=5,
        )
        return None
