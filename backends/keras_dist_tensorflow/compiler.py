"""Compiled functions on TensorFlow: one `tf.function` around each."""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.plugins import Call
from keras_dist.plugins import CallOfReplica
from keras_dist.plugins import CompiledFunction
from keras_dist.plugins import Compiler
from keras_dist.plugins import DistributedValues
from keras_dist.plugins import RunsReplicas
from keras_dist.plugins import check_arguments
from keras_dist.plugins import check_cross_replica
from keras_dist.plugins import in_replica_function
from keras_dist.plugins import leaves_of
from keras_dist.plugins import map_nest
from keras_dist.plugins import noting_exchanges
from keras_dist.plugins import run_uncompiled
from keras_dist_tensorflow import runtime_internals
from keras_dist_tensorflow.traced import Traced
from keras_dist_tensorflow.workers import TensorFlowWorkers

Step = Callable[..., Any]


class TensorFlowCompiler(Compiler):
    """Keeps each function's `tf.function`s; calls are made in `scope`."""

    def __init__(
        self,
        num_replicas: int | None = None,  # `None` on one device
        workers: TensorFlowWorkers | None = None,
    ) -> None:
        self._num_replicas = num_replicas
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

        def make(python_function: Step) -> Step:
            return lambda args, kwargs: python_function(*args, **kwargs)

        # The function may ask whether it is in replica context: each context
        # has a trace of its own.
        kind = ("call", in_replica_function())
        return self._call(function, kind, make, args, kwargs)

    def call_in_replica(
        self,
        function: CompiledFunction,
        call: CallOfReplica,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if runtime_internals.is_recording():
            # A tape cannot follow gradients through a `tf.function` to the
            # all-reduces between replicas.
            return function.python_function(*args, **kwargs)
        return super().call_in_replica(function, call, args, kwargs)

    def run(
        self,
        strategy: RunsReplicas,
        fn: "CompiledFunction | Callable[..., Any]",
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:
        assert isinstance(fn, CompiledFunction)  # nothing else without traces
        check_cross_replica(strategy, "run")
        if not tf.executing_eagerly():
            return run_uncompiled(strategy, fn.python_function, args, kwargs)

        def make(python_function: Step) -> Step:
            return functools.partial(run_uncompiled, strategy, python_function)

        return self._call(fn, ("run",), make, args, kwargs or {})

    def scan(
        self,
        strategy: RunsReplicas,
        function: CompiledFunction,
        batches: Sequence[tuple[Any, ...]],
    ) -> Any:
        check_cross_replica(strategy, "run")
        args = _stacked(batches) if tf.executing_eagerly() else None
        if args is None:
            return super().scan(strategy, function, batches)

        def make(python_function: Step) -> Step:
            return _loop_of(strategy, python_function, len(batches))

        kind = ("scan", len(batches))
        return self._call(function, kind, make, args, {})

    def _call(
        self,
        function: CompiledFunction,
        kind: object,
        make: Callable[[Step], Step],
        args: object,
        kwargs: object,
    ) -> Any:
        kept = self._kept.setdefault(function.key, {})
        traced = kept.get(kind)
        if traced is None or traced.is_outdated:
            # One worker may have to trace again, so that isn't compared.
            meets = None if traced is None else traced.meets
            traced = Traced(
                function.name,
                make(function.held_weakly()),
                self._jit_compile(function),
                meets,
            )
            kept[kind] = traced
        check_arguments(function, args, kwargs)
        recorded: contextlib.AbstractContextManager[None] = (
            contextlib.nullcontext()
            if self.workers is None
            else _recorded(self.workers, function.name, traced, args, kwargs)
        )
        # Without the scope, results are copied to the default device.
        with self.scope(), recorded:
            return traced(args, kwargs)

    def _jit_compile(self, function: CompiledFunction) -> bool | None:
        if not function.jit_compile or self._num_replicas is None:
            return function.jit_compile
        warnings.warn(
            "XLA compilation is off: TensorFlow can't compile a function for "
            f"several devices. Received: jit_compile=True for {function!r} on "
            f"{self._num_replicas} replicas. Leave `jit_compile` out to "
            "silence this.",
            stacklevel=5,
        )
        return None


@contextlib.contextmanager
def _recorded(
    workers: TensorFlowWorkers,
    name: str,
    traced: Traced,
    args: object,
    kwargs: object,
) -> Iterator[None]:
    """Records a call of a function in which workers meet."""
    call = Call(f"function `{name}`", f"function `{name}`")
    before = workers.num_traced
    if traced.meets is None:
        with noting_exchanges() as exchanges:
            traced.trace(args, kwargs)
        meets = workers.num_traced > before
        if meets:
            workers.compare_program(f"{call.text}, with {', '.join(exchanges)}")
        traced.meets = meets
    knows = traced.meets
    if knows:
        workers.recorder.note(call)
    with workers.explaining():
        yield
    traced.meets = knows or workers.num_traced > before
    if traced.meets and not knows:  # other arguments had another trace
        workers.recorder.note(call)


def _stacked(batches: Sequence[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """Stacks arguments of steps along a new axis; `None` if not dense."""
    columns = list(zip(*map(leaves_of, batches), strict=True))
    if not columns or not all(
        _is_dense(value)
        for column in columns
        for leaf in column
        for value in _components(leaf)
    ):
        return None
    of_leaves = iter([_joined(_stack, column) for column in columns])
    nest: tuple[Any, ...] = map_nest(lambda leaf: next(of_leaves), batches[0])
    return nest


def _loop_of(strategy: RunsReplicas, step: Step, num_steps: int) -> Step:
    """Returns a function that loops over `strategy.run` on stacked batches."""

    def loop(batches: tuple[Any, ...], _: object) -> Any:
        results: list[Any] = []

        def one(index: object) -> list[Any]:
            batch = map_nest(
                lambda leaf: _joined(lambda tensors: tensors[0][index], [leaf]),
                batches,
            )
            results[:] = [run_uncompiled(strategy, step, batch)]
            return [
                tf.convert_to_tensor(value)
                for leaf in leaves_of(results[0])
                if leaf is not None
                for value in _components(leaf)
            ]

        # Traced first and on its own: the loop needs the number, dtypes and
        # shapes of the body's results before it begins.
        body = tf.function(one, autograph=False).get_concrete_function(
            tf.TensorSpec((), tf.int32)
        )
        columns = iter(_collected(body, num_steps))

        def column(leaf: object) -> Any:
            if leaf is None:
                return None
            components = [next(columns) for _ in _components(leaf)]
            if not isinstance(leaf, DistributedValues):
                return components[0]
            return runtime_internals.NativePerReplica(components)

        return map_nest(column, results[0])

    return loop


def _collected(body: Any, num_steps: int) -> list[Any]:
    """Calls the body for steps 0, 1, ... and stacks each of its results."""
    arrays = tuple(
        tf.TensorArray(output.dtype, num_steps, element_shape=output.shape)
        for output in body.outputs
    )

    def again(index: Any, arrays: tuple[Any, ...]) -> tuple[Any, Any]:
        outputs = body(index)
        return index + 1, tuple(
            array.write(index, output)
            for array, output in zip(arrays, outputs, strict=True)
        )

    _, arrays = tf.while_loop(
        lambda index, _: index < num_steps,
        again,
        (tf.constant(0), arrays),
        parallel_iterations=1,
    )
    return [array.stack() for array in arrays]


def _components(leaf: object) -> tuple[Any, ...]:
    if isinstance(leaf, DistributedValues) and not isinstance(
        leaf, keras.Variable
    ):
        return leaf.values
    return (leaf,)


def _joined(fn: Callable[[list[Any]], Any], leaves: Sequence[Any]) -> Any:
    """Applies `fn` per replica, or once if the leaves are not per-replica."""
    if isinstance(leaves[0], tf.Tensor) or not isinstance(
        leaves[0], DistributedValues
    ):
        return fn(list(leaves))
    by_replica = zip(*[leaf.values for leaf in leaves], strict=True)
    return runtime_internals.NativePerReplica(
        [fn(list(tensors)) for tensors in by_replica]
    )


def _stack(values: list[Any]) -> Any:
    device = getattr(values[0], "device", None)
    with tf.device(device):
        return tf.stack(values)


def _is_dense(value: object) -> bool:
    return isinstance(value, (tf.Tensor, np.ndarray, np.generic))
