"""Several steps of the replicas as one `tf.while_loop`."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dist.core.nests import leaves_of
from keras_dist.core.nests import map_nest
from keras_dist.core.values import DistributedValues
from keras_dist.plugin.front_end import RunsReplicas
from keras_dist_tensorflow.runtime_internals import native_per_replica

Step = Callable[..., Any]


def stacked(batches: Sequence[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """Stacks the arguments of several steps along a new first axis.

    Batches have equal shapes. Returns a nest like one batch, or `None` if
    batches hold anything but dense tensors and arrays.
    """
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


def loop_of(strategy: RunsReplicas, step: Step, num_steps: int) -> Step:
    """Returns a function, to be traced, that loops over `strategy.run`.

    It takes what `stacked` returned, and keyword arguments that it ignores,
    and returns the results of all steps, stacked.
    """

    def loop(batches: tuple[Any, ...], _: Any) -> Any:
        results: list[Any] = []

        def one(index: Any) -> list[Any]:
            batch = map_nest(
                lambda leaf: _joined(lambda own: own[0][index], [leaf]),
                batches,
            )
            results[:] = [strategy.run_uncompiled(step, batch)]
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

        def column(leaf: Any) -> Any:
            if leaf is None:
                return None
            own = [next(columns) for _ in _components(leaf)]
            if not isinstance(leaf, DistributedValues):
                return own[0]
            return native_per_replica(own)

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


def _components(leaf: Any) -> tuple[Any, ...]:
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
    each = zip(*[leaf.values for leaf in leaves], strict=True)
    return native_per_replica([fn(list(own)) for own in each])


def _stack(values: list[Any]) -> Any:
    device = getattr(values[0], "device", None)
    with tf.device(device):
        return tf.stack(values)


def _is_dense(value: Any) -> bool:
    return isinstance(value, (tf.Tensor, np.ndarray, np.generic))
