"""Updates metrics once, with the global batch gathered from all replicas.

That is exact for any metric. Updates wait until a result is read or the step
ends, so that replicas meet once for all of them.
"""

import functools
import inspect
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from keras_dist.core import nests
from keras_dist.core.context import replaced
from keras_dist.core.packing import places
from keras_dist.core.rows import RowShard
from keras_dist.core.rows import scaled
from keras_dist.errors import MetricMergeError
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.fit.adding import numbers_that_add_up
from keras_dist.fit.adding import rows_that_add_up
from keras_dist.internals import keras_internals
from keras_dist.replica import exchange
from keras_dist.replica.assigned import Writes
from keras_dist.replica.state import ReplicaStep
from keras_dist.replica.state import of_thread


@dataclass(frozen=True)
class MetricUpdate:
    """One replica's call of `update_state`, with detached leaves.

    `place` is where it is made, if arrays are handed over, which may have rows.
    """

    metric: keras.metrics.Metric
    update_state: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    place: str | None

    def run(self, everyone: list[exchange.Entry]) -> Any:
        """Updates the metric with the arguments of all replicas."""
        return self.call(
            exchange.join_leaves(
                [leaves for leaves, _ in everyone],
                [share for _, share in everyone],
                exchange.mean_or_count,
            )
        )

    def call(self, leaves: list[Any]) -> Any:
        """Calls `update_state` with leaves in place of its own."""
        leaves = [
            leaf.value if isinstance(leaf, exchange.Common) else leaf
            for leaf in leaves
        ]
        passed = nests.pack([*self.args, *self.kwargs.values()], leaves)
        count = len(self.args)
        named = zip(self.kwargs, passed[count:], strict=True)
        return self.update_state(*passed[:count], **dict(named))


@dataclass(frozen=True)
class Additions:
    """The numbers that one replica's values add to a metric's variables."""

    metric: keras.metrics.Metric
    variables: list[keras.Variable]
    leaves: list[Any]
    place: None = None

    def run(self, everyone: list[exchange.Entry]) -> None:
        """Adds the sums of all replicas."""
        merged = exchange.join(self.leaves, everyone, exchange.mean_or_count)
        for variable, total in zip(self.variables, merged, strict=True):
            variable.assign(keras_internals.value_of(variable) + total)


Update = MetricUpdate | Additions
# The leaves of a replica's updates, its rows, and what it has assigned.
_Given = tuple[list[Any], RowShard, Writes]


def hook_metrics(metrics: Sequence[keras.metrics.Metric]) -> None:
    """Has the updates of metrics gathered while replicas run."""
    for metric in metrics:
        if "update_state" not in vars(metric):
            object.__setattr__(metric, "update_state", _hooked_update(metric))
            object.__setattr__(metric, "result", _hooked_result(metric))


def flush(step: ReplicaStep) -> None:
    """Meets the other replicas for all pending metric updates, if any.

    At the end of a step, variables get what the replicas assigned there, too.
    """
    waiting, step.waiting = step.waiting, None
    if waiting is not None:
        waiting()
    updates, step.updates = step.updates, []
    if not updates:
        return
    if step.is_ending:
        step.replica.check_values(step.model, step.scope.state_mapping)

    def update_all(given: list[_Given]) -> list[keras.Variable]:
        leaves, shares, writes = zip(*given, strict=True)
        if step.is_ending:
            step.commit(writes, shares)
        everyone = list(zip(leaves, shares, strict=True))
        ready, everyone = settled(step, updates, everyone)
        merge = exchange.mean_or_count
        run_together(ready, step.exchange(everyone, merge, alike=True))
        return [
            write.variable
            for replica_writes in writes
            for write in replica_writes.values()
        ]

    names = ", ".join([f"'{update.metric.name}'" for update in updates])
    local_entry = leaves_of(updates), step.share, step.writes
    written = step.replica.rendezvous(
        f"the metrics {names}", update_all, local_entry
    )
    for update in updates:
        step.forget(update.metric.variables)
    if step.is_ending:
        step.forget(written)
        step.writes.clear()
        step.set_anew.clear()
        step.has_ended = True


def settled(
    step: ReplicaStep, updates: Sequence[Update], everyone: list[exchange.Entry]
) -> tuple[list[Update], list[exchange.Entry]]:
    """Finds out which updates are given rows, at a rendezvous.

    Those that are given none become what they add to a metric's variables.
    """
    if not any(update.place for update in updates):
        return list(updates), everyone
    shares = [share for _, share in everyone]
    ready: list[Update] = []
    columns: list[list[Any]] = [[] for _ in everyone]
    slices = places([len(update.leaves) for update in updates])
    for update, place in zip(updates, slices, strict=True):
        by_replica = [leaves[place] for leaves, _ in everyone]
        if isinstance(update, MetricUpdate) and update.place:
            update, by_replica = _settled(step, update, by_replica, shares)
        ready.append(update)
        for column, leaves in zip(columns, by_replica, strict=True):
            column += leaves
    return ready, list(zip(columns, shares, strict=True))


def _settled(
    step: ReplicaStep,
    update: MetricUpdate,
    by_replica: list[list[Any]],
    shares: list[RowShard],
) -> tuple[Update, list[list[Any]]]:
    """Returns an update and each replica's leaves for it."""
    assert update.place is not None
    have_rows = step.have_rows(
        update.place, list(zip(by_replica, shares, strict=True))
    )
    if not any(have_rows):
        made = [_added_by(update, leaves) for leaves in by_replica]
        return made[0], [additions.leaves for additions in made]
    # Beside rows of all replicas, other values have to be those of all.
    rest = [
        i
        for i, leaf in enumerate(update.leaves)
        if not have_rows[i] and ops.is_tensor(leaf)
    ]
    columns = [([leaves[i] for leaves in by_replica], shares) for i in rest]

    def error(i: int) -> Exception:
        return _no_rows(update.metric, columns[i][0][0])

    for i, (column, _) in enumerate(columns):
        if len({tuple(x.shape) for x in column}) > 1:
            raise error(i)
    agreed = exchange.agreed(columns, step.strategy.executor, error)
    common = dict(zip(rest, map(exchange.Common, agreed), strict=True))
    return update, [
        [common.get(i, leaf) for i, leaf in enumerate(leaves)]
        for leaves in by_replica
    ]


def _no_rows(metric: Any, value: Any) -> ReplicaDivergenceError:
    return ReplicaDivergenceError(
        f"Metric '{metric.name}' was given arrays with rows, which it gets "
        "from all replicas, and beside them a value without rows that differs "
        f"between the replicas. Received: shape {tuple(value.shape)}, dtype "
        f"{value.dtype}. Expected: rows, or the same value on each replica."
    )


def leaves_of(updates: Sequence[Update]) -> list[Any]:
    """Returns one replica's leaves of all updates."""
    return [leaf for update in updates for leaf in update.leaves]


def run_together(
    updates: Sequence[Update], everyone: Sequence[exchange.Entry]
) -> None:
    """Updates metrics with the leaves of all replicas, at a rendezvous."""
    slices = places([len(update.leaves) for update in updates])
    for update, place in zip(updates, slices, strict=True):
        update.run([(leaves[place], share) for leaves, share in everyone])


def hook_own_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a metric's own `__call__`, to run it once with all rows."""
    place = _place_of_weight(functools.partial(original, None))

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = of_thread.step
        call = functools.partial(original, self)
        if step is None or "update_state" not in vars(self):
            return call(*args, **kwargs)
        flush(step)
        what = f"metric '{self.name}'"
        at = step.place(what)
        update = _update_of(self, call, place, args, kwargs, at)

        def call_once(everyone: list[exchange.Entry]) -> Any:
            merge = exchange.mean_or_count
            (ready,), everyone = settled(step, [update], everyone)
            value = ready.run(step.exchange(everyone, merge, alike=True))
            return self.result() if isinstance(ready, Additions) else value

        value = step.replica.rendezvous(
            what, call_once, (update.leaves, step.share)
        )
        step.forget(self.variables)
        return _noted(step, value)

    return __call__


def _hooked_update(metric: keras.metrics.Metric) -> Callable[..., Any]:
    update_state = metric.update_state
    place = _place_of_weight(update_state)
    adds_up, adds = rows_that_add_up(metric), numbers_that_add_up(metric)
    is_mean = type(metric).update_state is keras.metrics.Mean.update_state
    what = f"metric '{metric.name}'"

    def update_on_replicas(*args: Any, **kwargs: Any) -> Any:
        step = of_thread.step
        if step is None or step.is_compiled:
            return update_state(*args, **kwargs)
        step.replica.check_rendezvous(what)
        update: Update
        workers = step.replica.group.workers
        if adds(*args, **kwargs):
            update = _numbers_of(metric, *args, **kwargs)
        elif workers is not None and adds_up(*args, **kwargs):
            update = _additions_of(metric, step, update_state, args, kwargs)
        else:
            given = (*args, *kwargs.values())
            has_arrays = any(map(exchange.is_row_shaped, given))
            at = step.place(what) if has_arrays or not is_mean else None
            update = _update_of(metric, update_state, place, args, kwargs, at)
        step.updates.append(update)
        return None

    return update_on_replicas


def _hooked_result(metric: keras.metrics.Metric) -> Callable[..., Any]:
    result = metric.result

    def result_on_replicas() -> Any:
        step = of_thread.step
        if step is None or step.is_compiled:
            return result()
        flush(step)
        return _noted(step, result())

    return result_on_replicas


def _noted(step: ReplicaStep, value: object) -> Any:
    """Notes a metric's result, which is the same on each replica."""
    leaves = nests.leaves_of(value)
    step.results.update(zip(map(id, leaves), leaves, strict=True))
    return value


def _additions_of(
    metric: keras.metrics.Metric,
    step: ReplicaStep,
    update_state: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Additions:
    """Updates a metric, but for what it adds, with this replica's rows."""
    additions: list[tuple[keras.Variable, Any]] = []
    with replaced(step, additions=additions):
        update_state(*args, **kwargs)
    return _additions(metric, additions)


def _numbers_of(
    metric: keras.Metric, values: object, sample_weight: object = None
) -> Additions:
    """Returns what a sum, or a mean with a number of rows, changes by."""
    value = ops.convert_to_tensor(values, dtype=metric.dtype)
    if sample_weight is not None:
        if ops.is_tensor(sample_weight) or keras_internals.in_tf_graph():
            sample_weight = ops.cast(sample_weight, metric.dtype)
        value = scaled(value, sample_weight)
    changed = [(metric.total, value)]
    if isinstance(metric, keras.metrics.Mean):
        changed.append((metric.count, sample_weight))
    return _additions(metric, changed)


def _additions(
    metric: keras.metrics.Metric, changed: Sequence[tuple[Any, Any]]
) -> Additions:
    """Returns the additions to variables, as replicas sum them."""
    variables, values = zip(*changed, strict=True) if changed else ((), ())
    counts = map(exchange.RowCount, exchange.detached(list(values)))
    return Additions(metric, list(variables), list(counts))


def _added_by(update: MetricUpdate, leaves: list[Any]) -> Additions:
    """Returns what a metric's variables change by, if it is given some values.

    Raises:
        MetricMergeError: If a variable's `aggregation` is not "sum".
    """
    metric = update.metric
    for variable in metric.variables:
        if variable.aggregation != "sum":
            raise MetricMergeError(
                f"Metric '{metric.name}' was given numbers, or arrays without "
                "rows, of which each replica has its own, and its state "
                f"'{variable.path}' has aggregation='{variable.aggregation}'. "
                "Expected: arrays with rows, which the metric gets from all "
                "replicas, or states that add up (aggregation='sum')."
            )
    before = [keras_internals.value_of(v) for v in metric.variables]
    # In the memory where replicas meet.
    here = [ops.convert_to_tensor(x) if ops.is_tensor(x) else x for x in leaves]
    with keras.StatelessScope() as scope:
        update.call(here)
        after = [scope.get_current_value(v) for v in metric.variables]
    rows = zip(metric.variables, before, after, strict=True)
    changed = [(v, new - old) for v, old, new in rows if new is not None]
    return _additions(metric, changed)


def _place_of_weight(method: Callable[..., Any]) -> int | None:
    """Returns the position of `sample_weight`, `None` if it has none."""
    parameters = inspect.signature(method).parameters.values()
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return names.index("sample_weight") if "sample_weight" in names else None


def _update_of(
    metric: keras.metrics.Metric,
    update_state: Callable[..., Any],
    place: int | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    at: str | None,
) -> MetricUpdate:
    """Returns an update with an integer `sample_weight` as `RowCount`."""
    weight, is_named = kwargs.get("sample_weight"), True
    if weight is None and place is not None and place < len(args):
        weight, is_named = args[place], False
    if weight is not None and _is_integer_scalar(weight):
        counted = exchange.RowCount(weight)
        if is_named:
            kwargs = {**kwargs, "sample_weight": counted}
        else:
            args = (*args[:place], counted, *args[(place or 0) + 1 :])
    leaves = exchange.detached([*args, *kwargs.values()])
    return MetricUpdate(metric, update_state, args, kwargs, leaves, at)


def _is_integer_scalar(value: object) -> bool:
    if exchange.is_row_shaped(value):
        return False
    return isinstance(value, int) or "int" in str(getattr(value, "dtype", ""))
