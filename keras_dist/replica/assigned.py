"""Makes one value of what the replicas of a step assign to a variable.

A variable's `aggregation` tells how. Without one, replicas have to agree.
"""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
from keras import ops

from keras_dist.core.rows import RowShard
from keras_dist.errors import MetricMergeError
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_random
from keras_dist.plugin.executor import Executor
from keras_dist.replica import exchange


class Assigned(NamedTuple):
    """The value that one replica has assigned to a variable."""

    variable: Any
    value: Any
    adds: bool  # whether it has only added to the value before


# By the id of the variable.
Writes = dict[int, Assigned]


class _Given(NamedTuple):
    """The values that the replicas here have assigned to a variable."""

    variable: Any
    values: list[Any]
    shares: Sequence[RowShard]
    adds: bool


def set_aggregation(target: Any, aggregation: str) -> None:
    """Declares how replicas of `fit` combine what they assign to variables.

    For variables that somebody else's layer makes without `aggregation=`. What
    a layer of your own makes is better declared there, as in
    `self.add_weight(..., aggregation="mean")`.

    Args:
        target: A `keras.Variable`, or a built layer or model, of which all
            variables are meant that are not trained, but for those of seeds.
        aggregation: String. `"mean"`: a mean over rows, such as a moving
            average. `"sum"`: the sum of what replicas assign, or of what they
            add by `assign_add`. `"only_first_replica"`: that of replica 0.
            `"none"`: the same on each, or an error.

    Raises:
        ValueError: If there is no such aggregation, if it is `"mean"` and a
            variable has integers, or if the layer has no such variables.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     layer = keras.layers.BatchNormalization()
    ...     layer.build((None, 3))
    >>> keras_dist.set_aggregation(layer, "mean")
    >>> layer.moving_mean.aggregation
    'mean'
    """
    if aggregation not in _AGGREGATIONS:
        raise ValueError(
            "There is no such aggregation. Received: "
            f"aggregation={aggregation!r}. Expected: one of {_AGGREGATIONS}."
        )
    variables = [target]
    if not isinstance(target, keras.Variable):
        variables = [
            variable
            for variable in target.non_trainable_variables
            if not (variable.trainable or keras_random.is_seed(variable))
        ]
    if not variables:
        raise ValueError(
            f"{target!r} has no variables that are not trained. Expected: a "
            "layer that is built, with such variables."
        )
    for variable in variables:
        is_float = keras.backend.is_float_dtype(variable.dtype)
        if aggregation == "mean" and not is_float:
            raise ValueError(
                "A mean of integers is not an integer. Received: "
                f"aggregation='mean' for variable '{variable.path}' of dtype "
                f"{variable.dtype}. Expected: 'sum' or 'only_first_replica'."
            )
    for variable in variables:
        keras_internals.set_aggregation(variable, aggregation)


_AGGREGATIONS = ("mean", "sum", "only_first_replica", "none")


# What replicas agree on: by the id of a variable, what they gave it and
# the value.
Known = dict[int, tuple[list[Any], Any]]


def check(
    writes: Sequence[Writes],
    shares: Sequence[RowShard],
    alike: set[int],
    executor: Executor,
    known: Known,
) -> None:
    """Does what `combined` does where it may fail, and notes what it finds."""
    given = [
        assignment
        for assignment in _by_variable(writes, shares)
        if _kind(assignment, alike) == "none"
        and not _is_known(assignment, known)
    ]
    for assignment, value in zip(given, _agreed(given, executor), strict=True):
        known[id(assignment.variable)] = assignment.values, value


def _is_known(given: _Given, known: Known) -> bool:
    before, _ = known.get(id(given.variable), ([], None))
    return len(before) == len(given.values) and all(
        one is other for one, other in zip(before, given.values, strict=True)
    )


def combined(
    writes: Sequence[Writes],
    shares: Sequence[RowShard],
    alike: set[int],
    executor: Executor,
    known: Known,
) -> list[tuple[keras.Variable, Any]]:
    """Returns the new value of each variable that replicas assigned.

    Args:
        writes: Sequence with what each replica here has assigned.
        shares: Sequence with each one's `RowShard`.
        alike: Set of the ids of variables that get the same on each replica.
        executor: `Executor` of the strategy.
        known: `Known`, what `check` has found.

    Raises:
        ReplicaDivergenceError: If values differ and nothing is declared.
    """
    check(writes, shares, alike, executor, known)
    given = list(_by_variable(writes, shares))
    kinds = [_kind(assignment, alike) for assignment in given]
    new_values = [
        known[id(assignment.variable)][1]
        if kind == "none"
        else assignment.values[0]
        for assignment, kind in zip(given, kinds, strict=True)
    ]
    for kind, combine in (
        ("only_first_replica", _firsts),
        ("sum", _totals),
        ("mean", _means),
    ):
        places = [
            place
            for place, variable_kind in enumerate(kinds)
            if variable_kind == kind
        ]
        if places:
            values = combine([given[place] for place in places], executor)
            for place, value in zip(places, values, strict=True):
                new_values[place] = value
    return [(g.variable, v) for g, v in zip(given, new_values, strict=True)]


def _by_variable(
    writes: Sequence[Writes], shares: Sequence[RowShard]
) -> Iterator[_Given]:
    written = {
        key: replica_writes[key].variable
        for replica_writes in writes
        for key in replica_writes
    }
    for key, variable in written.items():
        if variable.synchronization == "on_read":
            raise MetricMergeError(
                f"Metric state '{variable.path}' was changed on several "
                "replicas by a metric that the model does not know, so "
                "its updates were not gathered. Make the metric an "
                "attribute of the model or pass it to `compile`."
            )
        values = [
            replica_writes[key].value if key in replica_writes else variable
            for replica_writes in writes
        ]
        adds = all(
            key not in replica_writes or replica_writes[key].adds
            for replica_writes in writes
        )
        yield _Given(variable, values, shares, adds)


def _kind(given: _Given, alike: set[int]) -> str:
    variable = given.variable
    if id(variable) in alike or keras_random.is_seed(variable):
        return "alike"
    is_mean = variable.aggregation == "mean"
    if is_mean and not exchange.is_float(given.values[0]):
        return "none"
    return str(variable.aggregation)


def _agreed(given: Sequence[_Given], executor: Executor) -> list[Any]:
    """Returns the values of variables that replicas have to agree on."""
    columns = [(assignment.values, assignment.shares) for assignment in given]
    return exchange.agreed(columns, executor, lambda i: _apart(given[i]))


def _firsts(given: Sequence[_Given], executor: Executor) -> list[Any]:
    """Returns the first replica's values."""
    values = [
        ops.convert_to_tensor(assignment.values[0]) for assignment in given
    ]
    workers = executor.workers
    return values if workers is None else workers.broadcast(values)


def _totals(given: Sequence[_Given], executor: Executor) -> list[Any]:
    """Returns sums of values, or old values with all that was added."""
    before = [
        ops.convert_to_tensor(assignment.variable) if assignment.adds else 0
        for assignment in given
    ]
    added = [
        exchange.sum_over_replicas(
            [ops.convert_to_tensor(value) - old for value in assignment.values],
            list(assignment.shares),
        )
        for old, assignment in zip(before, given, strict=True)
    ]
    if executor.workers is not None:
        added = executor.workers.sum(added)
    return [old + new for old, new in zip(before, added, strict=True)]


def _means(given: Sequence[_Given], executor: Executor) -> list[Any]:
    columns = [
        (assignment.values, list(assignment.shares)) for assignment in given
    ]
    return exchange.means(columns, executor.workers)


def _apart(given: _Given) -> ReplicaDivergenceError:
    variable = given.variable
    error = ReplicaDivergenceError(
        f"Variable '{variable.path}' (dtype {variable.dtype}, "
        f"aggregation='{variable.aggregation}') was assigned different values "
        "by the replicas of a step: each has only its own rows.\nExpected: the "
        "same value on each replica, or an `aggregation=` where the variable "
        "is made, as in `self.add_weight(..., aggregation='mean')`: 'mean' "
        "(a mean over rows), 'sum' (a count, or another sum) or "
        "'only_first_replica'. For a layer of somebody else's, call "
        "`keras_dist.set_aggregation(layer, 'mean')`. A sum over the rows of "
        "all replicas is `keras_dist.sum_over_rows(x)`; to get the rows "
        "themselves, use `keras_dist.get_replica_context().all_gather`."
    )
    error.about = "state", variable.path
    return error
