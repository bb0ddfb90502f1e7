"""The meetings that change variables: the update, and the end of a step."""

from collections.abc import Callable
from typing import Any

import keras

from keras_dist.core import nests
from keras_dist.errors import UnsupportedModelError
from keras_dist.fit.changed_gradients import warn_if_changed
from keras_dist.fit.metrics import flush
from keras_dist.internals.keras_internals import trainable_variables
from keras_dist.plugin.powers import UpdatesParts
from keras_dist.replica.exchange import detached
from keras_dist.replica.exchange import is_row_shaped
from keras_dist.replica.exchange import join
from keras_dist.replica.exchange import mean_over_rows
from keras_dist.replica.state import ReplicaState
from keras_dist.replica.state import ReplicaStep
from keras_dist.replica.state import Writes


def update(
    step: ReplicaState,
    optimizer: keras.optimizers.Optimizer,
    apply: Callable[[Any, Any, Any], None],
    grads: Any,
    variables: list[keras.Variable] | None,
) -> None:
    """Sums gradients over replicas, then updates variables once.

    `apply` is the optimizer's method as Keras has it. `grads` are this
    replica's gradients of `variables`, where `None` stands for all that the
    optimizer was built for.
    """

    grads = list(grads)
    warn_if_changed(step, optimizer, grads, variables)

    def update_once(everyone: list[Any]) -> None:
        gradients, shares, writes = zip(*everyone, strict=True)
        step.check(writes)
        # The update starts from values that the forward pass assigned, as
        # spectral normalization does.
        step.commit([_of_trainable(own) for own in writes], shares)
        step.check_owners([*optimizer.variables, *(variables or [])])
        step.check_trained(variables or trainable_variables(optimizer))
        _check_gradients_add_up(step, variables, optimizer)
        if not optimizer.built:
            with step.runner.building():
                optimizer.build(variables)
        runner = step.runner
        if isinstance(runner, UpdatesParts):
            weights = [share.weight for share in shares]
            runner.update_parts(optimizer, gradients, weights, variables)
        else:
            own = variables
            if own is None:
                own = trainable_variables(optimizer)
            reduced = step.sum_gradients(gradients, shares, own)
            with runner.updating(optimizer):
                apply(optimizer, reduced, variables)
        # Called in the meeting: when a replica goes on, those before it may
        # have written again.
        step.replica.committed()

    step.replica.meet(
        f"the update by optimizer '{optimizer.name}'",
        update_once,
        (step.of_its_own(grads), step.share, step.writes),
    )
    for key in _of_trainable(step.writes):
        del step.writes[key]
    step.forget([*(variables or ()), *trainable_variables(optimizer)])
    step.forget(optimizer.variables)


def _check_gradients_add_up(
    step: ReplicaState,
    variables: list[keras.Variable] | None,
    optimizer: keras.optimizers.Optimizer,
) -> None:
    """Refuses variables that are overwritten with their gradients."""
    if step.strategy.plan.num_replicas == 1:
        return
    for variable in variables or trainable_variables(optimizer):
        if getattr(variable, "overwrite_with_gradient", False):
            raise UnsupportedModelError(
                f"Variable '{variable.path}' is overwritten with its "
                "gradient, as float8 training does with the largest number of "
                "a batch, and replicas see rows of their own. Received: "
                f"{step.strategy!r}. Expected: a layer without float8 "
                "quantization, one device, or `fit` on JAX, where one program "
                "sees all rows."
            )


def _of_trainable(writes: Writes) -> Writes:
    return {key: pair for key, pair in writes.items() if pair[0].trainable}


def finish(step: ReplicaStep, result: Any, join_rows: bool) -> Any:
    """Ends a step: commits replicas' assignments and joins their results.

    `result` is the step's result on this replica. With `join_rows`, results
    have rows of the batch, as predictions do. Else they are logs: numbers are
    averaged over rows, and anything else is the same on each replica.

    Returns:
        The result that one device would have returned.
    """

    flush(step)
    known = [id(leaf) in step.results for leaf in nests.flatten(result)]

    def end(everyone: list[Any]) -> Any:
        leaves, shares, writes = zip(*everyone, strict=True)
        step.commit(writes, shares)
        if join_rows:
            each = step.exchange(list(zip(leaves, shares, strict=True)))
            return join(result, each, mean_over_rows)
        logs = [list(values) for values in zip(*leaves, strict=True)]
        known_to_all = [
            is_known or is_row_shaped(values[0])
            for is_known, values in zip(known, logs, strict=True)
        ]
        means = iter(
            step.means(
                [
                    (values, list(shares))
                    for values, is_known in zip(logs, known_to_all, strict=True)
                    if not is_known
                ]
            )
        )
        return nests.pack(
            result,
            [
                values[0] if is_known else next(means)
                for values, is_known in zip(logs, known_to_all, strict=True)
            ],
        )

    own = (detached(result), step.share, step.writes)
    return step.replica.meet("the end of the step", end, own)
