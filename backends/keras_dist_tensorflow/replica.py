"""One replica while its thread traces a step, or runs it eagerly.

A step adds gradients up with weights `rows / total`, right for means over rows;
gradients of sums over rows are multiplied by `total / rows` first.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any
from typing import TypeVar

import keras
import tensorflow as tf

from keras_dist.errors import UnsupportedModelError
from keras_dist.plugins import WHOLE
from keras_dist.plugins import Draw
from keras_dist.plugins import Replica
from keras_dist.plugins import ReplicaGroup
from keras_dist.plugins import ReplicaStep
from keras_dist.plugins import RowShard
from keras_dist.plugins import current_step
from keras_dist.plugins import inherit_thread_state
from keras_dist.plugins import scaled
from keras_dist.plugins import thread_state
from keras_dist.plugins import with_weighed_gradient
from keras_dist_tensorflow.draws import draw_rows
from keras_dist_tensorflow.keras_internals import native_of

T = TypeVar("T")


class TensorFlowReplica(Replica):
    """A replica of a run."""

    def __init__(
        self,
        index: int,
        share: RowShard,
        round_: Any,
        group: ReplicaGroup,
    ) -> None:
        super().__init__(index, share, group)
        self.round = round_
        self._graph = tf.compat.v1.get_default_graph()

    def draw(self, draw: Draw) -> Any:
        return draw_rows(draw, self.share)

    def rendezvous(
        self, what: str, fn: Callable[[list[Any]], T], value: Any
    ) -> T:
        self.check_rendezvous(what)
        result: T = self.round.rendezvous(self.index, what, fn, value)
        return result

    def check_rendezvous(self, what: str) -> None:
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise UnsupportedModelError(
                f"Replicas can't wait for each other for {what} inside of "
                "`cond`, `while_loop`, `scan`, `map`, a recurrent layer's "
                "cell or a `tf.function` of its own: TensorFlow traces those "
                "separately. Expected: losses, metrics, updates and batch "
                "normalization outside of control flow. Move the call out, "
                "unroll the loop (`unroll=True` in recurrent layers), "
                "compile with `run_eagerly=True`, or use one device."
            )

    def read(self, variable: keras.Variable) -> Any:
        native = native_of(variable)
        if native is None:
            raise UnsupportedModelError(
                f"Variable '{variable.path}' was made in the middle of a "
                "step, on one replica. Expected: layers, metrics and "
                "optimizers that were built before. Build the model before "
                "`fit`, with `model.build(shape)` or by calling it on a "
                "batch."
            )
        return native

    def check_write(self, variable: keras.Variable) -> None:
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise UnsupportedModelError(
                f"Variable '{variable.path}' was assigned inside of `cond`, "
                "`while_loop`, `scan`, `map` or a `tf.function` of its own, "
                "which TensorFlow traces separately, so the replica can't "
                "keep the value. Expected: assignments, random layers, "
                "metrics and batch normalization in the replica function "
                "itself. Wrap the whole of `strategy.run` in a `tf.function` "
                "instead."
            )

    def hold(self, variable: keras.Variable, value: object) -> Any:
        if self.share is WHOLE or not variable.trainable:
            self.check_write(variable)
        if not variable.trainable:
            # As a variable, which no gradient passes through.
            return tf.stop_gradient(value)
        return self.hold_trainable(variable, value)

    @abstractmethod
    def hold_trainable(self, variable: keras.Variable, value: object) -> Any:
        """Does `hold` for a trainable variable, which tapes watch."""


def capture_thread() -> Callable[[], None]:
    """Captures this thread's state in a function that sets it in another."""
    with tf.init_scope():
        state = thread_state()
    return functools.partial(inherit_thread_state, state)


def hook_custom_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps what calls a function with a gradient of its own."""

    @functools.wraps(original)
    def call(f: Any, args: Any, kwargs: Any) -> Any:
        return original(with_weighed_gradient(f), args, kwargs)

    return call


def hook_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `GradientTape.gradient`, which sums over rows in a replica."""

    @functools.wraps(original)
    def gradient(
        self: tf.GradientTape,
        target: object,
        sources: object,
        output_gradients: object = None,
        unconnected_gradients: object = tf.UnconnectedGradients.NONE,
    ) -> Any:
        def of(weights: object) -> Any:
            return original(
                self, target, sources, weights, unconnected_gradients
            )

        step = current_step()
        if step is None:
            return of(output_gradients)
        return _counted(step, of, target, sources, output_gradients)

    return gradient


def _counted(
    step: ReplicaStep,
    of: Callable[[Any], Any],
    target: object,
    sources: object,
    output_gradients: object,
) -> Any:
    """Scales gradients of sums over rows, which `of` returns."""
    targets = tf.nest.flatten(target)
    are_variables = [_is_variable(s) for s in tf.nest.flatten(sources)]
    if (
        step.has_global_rows
        or not any(map(_has_axis, targets))
        or not any(are_variables)
    ):
        return of(output_gradients)
    are_sums = _are_sums(step, targets)
    if not any(are_sums):
        return of(output_gradients)
    inverse = step.share.inverse
    if not all(are_variables) and not all(are_sums):
        raise UnsupportedModelError(
            "One call of `tape.gradient` asks for gradients of targets with "
            "a value for each row and of targets without, with respect to "
            "variables and other tensors.\nReceived: targets of shapes "
            f"{[tuple(tensor.shape) for tensor in targets]}. Expected: targets "
            "of one kind, because each replica has only a share of the rows. "
            "Call `tape.gradient` once for each kind, with a persistent tape."
        )
    if not all(are_variables):
        result = of(output_gradients)
        return tf.nest.pack_sequence_as(
            sources,
            [
                _scaled(gradient, inverse) if is_variable else gradient
                for gradient, is_variable in zip(
                    tf.nest.flatten(result), are_variables, strict=True
                )
            ],
        )
    # Scaled before the backward pass and not after: sums over replicas
    # within it, as those of batch statistics, weigh each replica as if
    # the target were a mean.
    weights = [None] * len(targets)
    if output_gradients is not None:
        weights = tf.nest.flatten(output_gradients)
    return of(
        tf.nest.pack_sequence_as(
            target,
            [
                _scaled(
                    tf.ones_like(tensor) if weight is None else weight,
                    inverse if is_sum else 1.0,
                )
                for tensor, weight, is_sum in zip(
                    targets, weights, are_sums, strict=True
                )
            ],
        )
    )


def _has_axis(target: object) -> bool:
    shape = getattr(target, "shape", None)
    return shape is not None and bool(shape.rank)


def _are_sums(step: ReplicaStep, targets: list[Any]) -> list[bool]:
    """Finds the targets with equally many values for each row everywhere."""
    rows = step.share.rows
    may_be = [_may_be_sum(target, step.share) for target in targets]
    if not isinstance(rows, int):
        return may_be
    local_ratios = [
        target.shape[0] / rows if rows and it_may and target.shape[0] else None
        for target, it_may in zip(targets, may_be, strict=True)
    ]

    def agree(everyone: list[tuple[list[float | None], list[bool]]]) -> Any:
        ratios, may_be = zip(*everyone, strict=True)
        return [
            all(it_may) and len(set(target_ratios) - {None}) <= 1
            for target_ratios, it_may in zip(
                zip(*ratios, strict=True),
                zip(*may_be, strict=True),
                strict=True,
            )
        ]

    what = "the gradient of targets with a value for each row"
    result: list[bool] = step.replica.rendezvous(
        what, agree, (local_ratios, may_be)
    )
    return result


def _may_be_sum(target: Any, share: RowShard) -> bool:
    """Returns whether a target's elements may belong to rows."""
    if not _has_axis(target):
        return False
    is_in_graph = isinstance(target, tf.Tensor) and not tf.executing_eagerly()
    if is_in_graph and target.op.type == "Pack" and target.shape.rank == 1:
        return False  # a stack of losses, each over all rows
    size = target.shape[0]
    if size is None or not isinstance(share.rows, int):
        return size is None
    return bool(size % max(share.rows, 1) == 0)


def _is_variable(source: object) -> bool:
    return isinstance(source, (keras.Variable, tf.Variable))


def _scaled(gradient: object, factor: object) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = scaled(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return None if gradient is None else scaled(gradient, factor)
