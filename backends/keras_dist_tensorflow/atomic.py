"""Atomic steps: a step that fails while its graph runs assigns nothing.

Assignments wait for all gradients, and so for all operations before them.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dist.plugins import as_hook
from keras_dist.plugins import current_replica
from keras_dist.plugins import inlines
from keras_dist.plugins import replaced


class _Current(threading.local):
    order: "AssignmentOrder | None" = None


_current = _Current()


class AssignmentOrder:
    """Control dependencies of assignments; `checks` may fail."""

    def __init__(self) -> None:
        self._tensors: list[Any] = []
        self.checks: list[Any] = []

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Makes new operations wait for the gradients and checks so far."""
        waits = tf.control_dependencies([*self._tensors, *self.checks])
        with replaced(_current, order=self), waits:
            yield

    def passed(self, tensors: list[Any]) -> None:
        """Sets the tensors that later assignments wait for."""
        if not tf.executing_eagerly():
            self._tensors = tensors


def wait_for(check: object) -> None:
    """Makes later assignments of the current step wait for an operation."""
    if _current.order is not None:
        _current.order.checks.append(check)


def _build(optimizer: keras.Optimizer, variables: list[Any]) -> None:
    """Makes an optimizer's variables, whose initial values wait for nothing."""
    if inlines():
        names = keras.name_scope(optimizer.name)
        # The gradients may be in a loop.
        with tf.init_scope(), tf.device(variables[0].value.device), names:
            optimizer.build(variables)
    elif "distribute_strategy" in vars(variables[0]):
        # Among the operations that wait for the gradients, they could not be
        # made before the step runs, which XLA needs.
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)


@as_hook
def hook_apply(
    original: Any, self: Any, grads: Any, trainable_variables: Any = None
) -> None:
    """Stands for `apply`, which builds outside of graphs and waits there."""
    if tf.executing_eagerly():
        original(self, grads, trainable_variables)
        return
    is_outside = current_replica() is None
    if trainable_variables and not self.built and is_outside:
        trainable_variables = list(trainable_variables)
        _build(self, trainable_variables)
    variables = self.variables
    if not variables or "distribute_strategy" not in vars(variables[0]):
        original(self, grads, trainable_variables)
        return
    grads = list(grads)
    tensors = [
        g.values if isinstance(g, tf.IndexedSlices) else g
        for g in grads
        if g is not None
    ]
    order = _current.order
    checks = [] if order is None else order.checks
    waits = tf.control_dependencies([*tensors, *checks])
    with replaced(_current, order=None), waits:
        original(self, grads, trainable_variables)
    # `None` for an optimizer inside of another one, such as that of
    # `LossScaleOptimizer`: its gradients may be in a branch.
    if order is not None:
        order.passed(tensors)
