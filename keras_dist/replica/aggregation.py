"""Aggregation of the values that replicas assign to a variable."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist.core.reduction import ReduceOp
from keras_dist.core.reduction import is_zero
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.internals import keras_random


def aggregate(variable: keras.Variable, values: Sequence[Any]) -> Any:
    """Combines the replicas' values, by the variable's `aggregation`."""
    if variable.aggregation == "only_first_replica":
        return _mirrored(variable, first_of_all(variable, values[0]))
    if len(values) > 1 and all(value is values[0] for value in values):
        if variable.aggregation == "sum" and not is_zero(values[0]):
            raise ValueError(
                f"A non-DistributedValues value {values[0]!r} cannot be "
                "reduced with the given reduce op ReduceOp.SUM. It is one "
                "value, the same on each replica, and was assigned to "
                f"variable '{variable.path}' with aggregation 'sum'. Assign "
                "it in cross-replica context, or assign a different part on "
                "each replica."
            )
        return _mirrored(variable, values[0])
    op = ReduceOp.from_variable_aggregation(variable.aggregation)
    return combine_all_on_primary(op, [(variable, values)])[0]


def _mirrored(variable: keras.Variable, value: object) -> Any:
    """Copies a tensor to where variables are; returns a number as it is."""
    if not hasattr(value, "shape"):
        return value
    return variable.distribute_strategy.executor.mirror(value)


def first_of_all(variable: keras.Variable, value: object) -> Any:
    """Returns the value of the chief's first replica, on every worker."""
    workers = variable.distribute_strategy.executor.workers
    if workers is None:
        return value
    tensor = ops.cast(ops.convert_to_tensor(value), variable.dtype)
    return workers.broadcast([tensor])[0]


def combine_all_on_primary(
    op: ReduceOp, pairs: Sequence[tuple[Any, Sequence[Any]]]
) -> list[Any]:
    """Combines the values of several variables of one strategy at once."""
    if not pairs:
        return []
    strategy = pairs[0][0].distribute_strategy
    everyone = []
    for variable, values in pairs:
        here = [strategy.executor.put(v, strategy.plan.primary) for v in values]
        if op is not ReduceOp.MEAN:
            here = [ops.cast(value, variable.dtype) for value in here]
        everyone.append(here)
    combined = strategy.combine_all(op, everyone)
    return [
        strategy.executor.mirror(ops.cast(value, variable.dtype))
        for (variable, _), value in zip(pairs, combined, strict=True)
    ]


def set_all_components(pairs: Sequence[tuple[Any, Sequence[Any]]]) -> None:
    """Sets the components of several `SyncOnReadVariable`s at once."""
    combined: dict[int, Any] = {}
    for aggregation in ("sum", "mean"):
        op = ReduceOp.from_variable_aggregation(aggregation)
        chosen = [p for p in pairs if p[0].aggregation == aggregation]
        totals = combine_all_on_primary(op, chosen)
        for (variable, _), total in zip(chosen, totals, strict=True):
            combined[id(variable)] = total
    for variable, values in pairs:
        if id(variable) not in combined:
            value = values[0]
            if variable.aggregation == "only_first_replica":
                value = first_of_all(variable, value)
            executor = variable.distribute_strategy.executor
            combined[id(variable)] = executor.mirror(value)
    for variable, values in pairs:
        variable.hold_components(values, combined[id(variable)])


def agreed_value(variable: keras.Variable, values: Sequence[Any]) -> Any:
    """Returns the common value of a variable with aggregation `"none"`: the
    mean of moving statistics, a seed's first; others have to be equal."""
    is_float = "float" in keras.backend.standardize_dtype(variable.dtype)
    if is_float and not variable.trainable:
        return combine_all_on_primary(ReduceOp.MEAN, [(variable, values)])[0]
    if keras_random.is_seed(variable):
        return variable.distribute_strategy.executor.mirror(values[0])
    return equal_value(
        variable,
        values,
        f"Replicas left different values in variable '{variable.path}', whose "
        "aggregation is 'none'",
        "the same value on each replica. Make the variable with "
        "`aggregation='mean'`, 'sum' or 'only_first_replica'. If each replica "
        "should keep its own value, use `synchronization='on_read'`.",
    )


def equal_value(
    variable: keras.Variable, values: Sequence[Any], problem: str, expected: str
) -> Any:
    """Returns what replicas have alike; else raises an error of these words."""

    def error() -> Exception:
        # Of many numbers, the first and last.
        shown = [
            np.array2string(ops.convert_to_numpy(value), threshold=6)
            for value in values
        ]
        return ReplicaDivergenceError(
            f"{problem}. Received: {shown}. Expected: {expected}"
        )

    executor = variable.distribute_strategy.executor
    executor.check_equal(values, error)
    return executor.mirror(values[0])
