"""Updates by optimizers: replicas meet, sum their gradients, update once."""

import functools
import itertools
import threading
import warnings
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.core import context
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.errors import UnsupportedModelError
from keras_dist.errors import see_section
from keras_dist.fit.metrics import leaves_of
from keras_dist.fit.metrics import run_together
from keras_dist.internals import keras_internals
from keras_dist.internals.hooks import as_hook
from keras_dist.internals.hooks import overrides
from keras_dist.internals.keras_optimizers import trainable_variables
from keras_dist.plugin.capabilities import UpdatesShards
from keras_dist.replica import exchange
from keras_dist.replica import state


def update(
    step: state.ReplicaState,
    optimizer: keras.optimizers.Optimizer,
    apply: Callable[[Any, Any, Any], None],
    grads: Any,
    variables: list[keras.Variable] | None,
) -> None:
    """Sums gradients over replicas, then calls Keras' `apply` once.

    Where only Keras' own code follows in the step, which reads no variables but
    those of metrics, this waits for metrics to travel with the gradients.
    """
    grads = list(grads)
    in_fit = step if isinstance(step, state.ReplicaStep) else None
    if in_fit is not None:
        in_fit.replica.check_values(in_fit.model, in_fit.scope.state_mapping)
    waiting, step.waiting = step.waiting, None
    if waiting is not None:
        waiting()
    updated_variables = variables
    if updated_variables is None:
        updated_variables = trainable_variables(optimizer)
    carries = is_last = is_ending = False
    if in_fit is not None:
        carries = in_fit.runner.carries(updated_variables)
        model = in_fit.model
        # Nothing follows but metrics.
        is_last = step.ends_with_metrics and optimizer is model.optimizer
        # And no layer has updated one so far.
        tracked = {id(pending.metric) for pending in step.updates}
        is_ending = is_last and tracked <= {id(model._loss_tracker)}
    update_now = functools.partial(
        _update_together, step, optimizer, apply, grads, variables, carries
    )
    is_of_keras = not overrides(type(optimizer), "apply")
    if carries and is_last and is_of_keras and "apply" not in vars(optimizer):
        step.waiting = update_now
    else:
        update_now()
    step.is_ending = is_ending


def _update_together(
    step: state.ReplicaState,
    optimizer: keras.optimizers.Optimizer,
    apply: Callable[[Any, Any, Any], None],
    grads: list[Any],
    variables: list[keras.Variable] | None,
    carries: bool,
) -> None:
    riders = _riders(step) if carries else []

    def update_once(everyone: list[Any]) -> None:
        gradients, shares, writes, leaves, trains = zip(*everyone, strict=True)
        if any(ids != trains[0] for ids in trains):
            raise _apart(step, optimizer, trains)
        step.check(writes, shares)
        # The update starts from values that the forward pass assigned, as
        # spectral normalization does.
        step.commit(
            [_of_trainable(replica_writes) for replica_writes in writes], shares
        )
        trained = variables or trainable_variables(optimizer)
        step.check_update([*optimizer.variables, *(variables or [])], trained)
        _check_gradients_add_up(step, trained)
        if not optimizer.built:
            with step.runner.building():
                optimizer.build(variables)
        runner = step.runner
        weights = [share.weight for share in shares]
        if isinstance(runner, UpdatesShards):
            runner.update_shards(optimizer, gradients, weights, variables)
        else:
            updated_variables = variables
            if updated_variables is None:
                updated_variables = trainable_variables(optimizer)
            _check_count(optimizer, gradients[0], updated_variables)
            entries = list(zip(leaves, shares, strict=True))
            sums = step.sum_gradients(
                gradients,
                weights,
                updated_variables,
                exchange.terms_of(entries),
            )
            count = len(updated_variables)
            with runner.updating(optimizer):
                apply(optimizer, sums[:count], variables)
            run_together(riders, [exchange.as_sums(leaves[0], sums[count:])])
        # Called at the rendezvous: when a replica goes on, those before it may
        # have written again.
        step.replica.committed()

    step.replica.rendezvous(
        f"the update by optimizer '{optimizer.name}'",
        update_once,
        (
            step.of_its_own(grads),
            step.share,
            step.writes,
            leaves_of(riders),
            None
            if variables is None
            else [id(variable) for variable in variables],
        ),
    )
    for key in _of_trainable(step.writes):
        del step.writes[key]
    step.forget([*(variables or ()), *trainable_variables(optimizer)])
    step.forget(optimizer.variables)
    for rider in riders:
        step.forget(rider.metric.variables)


def _check_count(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
) -> None:
    if len(gradients) != len(variables):
        raise ValueError(
            f"Optimizer '{optimizer.name}' was given gradients that do not "
            f"match its variables. Received: {len(gradients)} gradients for "
            f"{len(variables)} variables. Expected: a gradient, or `None`, "
            "for each variable, in their order."
        )


def _riders(step: state.ReplicaState) -> list[Any]:
    """Takes the metric updates that wait and can travel with gradients."""
    waiting = list(step.updates)

    def is_rider(update: Any) -> bool:
        return update.place is None and all(
            map(exchange.adds_up, update.leaves)
        )

    riders = list(itertools.takewhile(is_rider, waiting))
    step.updates = waiting[len(riders) :]
    return riders


def _apart(
    step: state.ReplicaState,
    optimizer: keras.optimizers.Optimizer,
    trains: Sequence[list[int] | None],
) -> ReplicaDivergenceError:
    counts = [None if ids is None else len(ids) for ids in trains]
    return ReplicaDivergenceError(
        f"Replicas gave optimizer '{optimizer.name}' the gradients of "
        f"different variables.\nReceived: {counts} variables, by replica, or "
        "others of them. Each replica runs the step once, so a count in a "
        "Python attribute rises by "
        f"{len(trains)} in each step. Expected: the same variables on each "
        "replica. Decide by `optimizer.iterations`, by a count that a "
        "callback keeps, or outside of the step."
    )


def _check_gradients_add_up(
    step: state.ReplicaState, variables: Sequence[keras.Variable]
) -> None:
    """Refuses variables that are overwritten with their gradients."""
    if step.strategy.plan.num_replicas == 1:
        return
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise UnsupportedModelError(
                f"Variable '{variable.path}' is overwritten with its "
                "gradient.\nFloat8 training does this with the largest number "
                "of a batch, but each replica sees only its own rows. "
                f"Received: {step.strategy!r}. Expected: a layer without "
                "float8 quantization, one device, or `fit` on JAX, where one "
                "program sees all rows."
            )


def _of_trainable(writes: state.Writes) -> state.Writes:
    return {key: write for key, write in writes.items() if write[0].trainable}


class _Here(threading.local):
    def __init__(self) -> None:
        self.applies = False


_here = _Here()


@as_hook
def hook_apply(
    original: Any, self: Any, grads: Any, trainable_variables: Any = None
) -> None:
    """Stands for an optimizer's `apply`; sums replicas' gradients before it."""
    step = state.current_replica()
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    if step is not None and step.is_compiled:
        original(self, grads, trainable_variables)  # of all replicas already
    elif step is None:
        # Not if another `apply`, a wrapper's, has called this one.
        if not _here.applies:
            _look_at(self, trainable_variables)
        with context.replaced(_here, applies=True):
            original(self, grads, trainable_variables)
    else:
        update(step, self, original, grads, trainable_variables)


def _look_at(optimizer: Any, variables: Any) -> None:
    """Warns once of a loop that trains without ever running a replica.

    A single update does not count: it may be for making an optimizer's slots.
    """
    if (
        context.in_replica_function()
        or keras_internals.stateless_scope() is not None
    ):
        return
    if variables is None:
        variables = trainable_variables(optimizer)
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
        "`strategy.run`.\nNeither was called before, so one device computes "
        "everything. Put the step into a function, and call it with "
        "`strategy.run(step, args=(batch,))`. Take the batch from "
        "`strategy.experimental_distribute_dataset`. "
        f"{see_section('A loop that is not distributed')}",
        stacklevel=5,
    )
