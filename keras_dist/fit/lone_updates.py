"""Warns of a training loop that is not distributed."""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist.core import context
from keras_dist.fit.updates import update
from keras_dist.internals import keras_internals
from keras_dist.internals.overrides import hook_overrides
from keras_dist.replica.state import current_replica

SECTION = "A loop that is not distributed"


class _Here(threading.local):
    """This thread's flag for an `apply` outside of replicas."""

    applies = False


_here = _Here()


@contextlib.contextmanager
def _outermost() -> Iterator[bool]:
    """Yields whether no other `apply` (a wrapper's) has called this one."""
    before, _here.applies = _here.applies, True
    try:
        yield not before
    finally:
        _here.applies = before


def hook_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an optimizer's `apply`, to sum replicas' gradients before it."""

    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        step = current_replica()
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if step is None:
            with _outermost() as is_outermost:
                if is_outermost:
                    _look_at(self, trainable_variables)
                original(self, grads, trainable_variables)
        elif not step.is_rehearsal:
            update(step, self, original, grads, trainable_variables)

    return apply


@functools.cache
def install() -> None:
    """Wraps the `apply` of optimizers, for good."""
    for optimizer in (
        keras.optimizers.Optimizer,
        keras.optimizers.LossScaleOptimizer,
    ):
        optimizer.apply = hook_apply(optimizer.apply)
    # So a user's own `apply` gets the sum of gradients.
    hook_overrides(keras.optimizers.Optimizer, "apply", hook_apply)


def _look_at(optimizer: Any, variables: Any) -> None:
    """Warns once of a loop that trains without ever running a replica.

    A single update does not count: a program may make an optimizer's slots by
    it.
    """
    if (
        context.in_replica_function()
        or keras_internals.stateless_scope() is not None
    ):
        return
    if variables is None:
        variables = keras_internals.trainable_variables(optimizer)
    if not variables or not isinstance(variables[0], keras.Variable):
        return
    # A variable outside of layers may belong to something else than a model.
    if "/" not in variables[0].path:
        return
    strategy = vars(variables[0]).get("distribute_strategy")
    if strategy is None or strategy.has_run or strategy.plan.num_replicas == 1:
        return
    # A traced update runs again and again without passing here.
    strategy.num_lone_updates += 2 if keras_internals.in_tf_graph() else 1
    if strategy.num_lone_updates < 2:
        return
    strategy.has_run = True
    warnings.warn(
        f"Nothing is distributed: optimizer '{optimizer.name}' updates "
        f"variable '{variables[0].path}' of {strategy!r} outside of `fit` and "
        "of `strategy.run`, which were not called so far, so that one device "
        "computes it all. Put the step into a function, and call it with "
        "`strategy.run(step, args=(batch,))`, of a batch from "
        "`strategy.experimental_distribute_dataset`. See "
        f"'{SECTION}' in tutorials/errors.md.",
        stacklevel=4,
    )
