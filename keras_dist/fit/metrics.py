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

from keras_dist.core import nests
from keras_dist.core.context import replaced
from keras_dist.core.packing import places
from keras_dist.fit.adding import rows_that_add_up
from keras_dist.internals import keras_internals
from keras_dist.internals.overrides import hook_override
from keras_dist.replica import exchange
from keras_dist.replica.state import ReplicaStep
from keras_dist.replica.state import current_step


@dataclass(frozen=True)
class MetricUpdate:
    """One replica's call of `update_state`, with detached leaves."""

    metric: keras.metrics.Metric
    update_state: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]

    def run(self, everyone: list[exchange.Entry]) -> Any:
        """Updates the metric with the arguments of all replicas."""
        passed = [*self.args, *self.kwargs.values()]
        merged = exchange.join(passed, everyone, exchange.mean_or_count)
        count = len(self.args)
        named = zip(self.kwargs, merged[count:], strict=True)
        return self.update_state(*merged[:count], **dict(named))


@dataclass(frozen=True)
class Additions:
    """The numbers that one replica's rows add to a metric's variables."""

    metric: keras.metrics.Metric
    variables: list[keras.Variable]
    leaves: list[Any]

    def run(self, everyone: list[exchange.Entry]) -> None:
        """Adds the sums of all replicas."""
        merged = exchange.join(self.leaves, everyone, exchange.mean_or_count)
        for variable, total in zip(self.variables, merged, strict=True):
            variable.assign(keras_internals.value_of(variable) + total)


Update = MetricUpdate | Additions


def hook_metrics(metrics: Sequence[keras.metrics.Metric]) -> None:
    """Has the updates of metrics gathered while replicas run."""
    for metric in metrics:
        if "update_state" not in vars(metric):
            hook_override(type(metric), "__call__", _hooked_call)
            object.__setattr__(metric, "update_state", _hooked_update(metric))
            object.__setattr__(metric, "result", _hooked_result(metric))


def flush(step: ReplicaStep) -> None:
    """Meets the other replicas for all pending metric updates, if any."""
    waiting, step.waiting = step.waiting, None
    if waiting is not None:
        waiting()
    updates, step.updates = step.updates, []
    if not updates:
        return

    def update_all(everyone: list[exchange.Entry]) -> None:
        merge = exchange.mean_or_count
        run_together(updates, step.exchange(everyone, merge, alike=True))

    names = ", ".join(f"'{update.metric.name}'" for update in updates)
    own = leaves_of(updates), step.share
    step.replica.meet(f"the metrics {names}", update_all, own)
    for update in updates:
        step.forget(update.metric.variables)


def leaves_of(updates: Sequence[Update]) -> list[Any]:
    """Returns one replica's leaves of all updates."""
    return [leaf for update in updates for leaf in update.leaves]


def run_together(
    updates: Sequence[Update], everyone: Sequence[exchange.Entry]
) -> None:
    """Updates metrics with the leaves of all replicas, in a meeting."""
    own = places([len(update.leaves) for update in updates])
    for update, place in zip(updates, own, strict=True):
        update.run([(leaves[place], share) for leaves, share in everyone])


def _hooked_call(original: Any) -> Callable[..., Any]:
    """Wraps a metric's own `__call__`, to run it once with all rows."""
    place = _place_of_weight(functools.partial(original, None))

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = current_step()
        own = functools.partial(original, self)
        if step is None or "update_state" not in vars(self):
            return own(*args, **kwargs)
        if step.is_rehearsal:
            return self.result()
        flush(step)
        update = _update_of(self, own, place, args, kwargs)

        def call_once(everyone: list[exchange.Entry]) -> Any:
            merge = exchange.mean_or_count
            return update.run(step.exchange(everyone, merge, alike=True))

        what = f"metric '{self.name}'"
        value = step.replica.meet(what, call_once, (update.leaves, step.share))
        step.forget(self.variables)
        step.results.update((id(leaf), leaf) for leaf in nests.flatten(value))
        return value

    return __call__


def _hooked_update(metric: keras.metrics.Metric) -> Callable[..., Any]:
    update_state = metric.update_state
    place = _place_of_weight(update_state)
    adds_up = rows_that_add_up(metric)

    def update_on_replicas(*args: Any, **kwargs: Any) -> Any:
        step = current_step()
        if step is None:
            return update_state(*args, **kwargs)
        if step.is_rehearsal:
            return None
        step.replica.check_meeting(f"metric '{metric.name}'")
        update: Update
        workers = step.replica.group.workers
        if workers is not None and adds_up(*args, **kwargs):
            update = _additions_of(metric, step, update_state, args, kwargs)
        else:
            update = _update_of(metric, update_state, place, args, kwargs)
        step.updates.append(update)
        return None

    return update_on_replicas


def _hooked_result(metric: keras.metrics.Metric) -> Callable[..., Any]:
    result = metric.result

    def result_on_replicas() -> Any:
        step = current_step()
        if step is None:
            return result()
        flush(step)
        value = result()
        # A metric's state is the same on each replica.
        step.results.update((id(leaf), leaf) for leaf in nests.flatten(value))
        return value

    return result_on_replicas


def _additions_of(
    metric: keras.metrics.Metric,
    step: ReplicaStep,
    update_state: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Additions:
    """Updates a metric, but for what it adds, with this replica's rows."""
    found: list[tuple[keras.Variable, Any]] = []
    with replaced(step, additions=found):
        update_state(*args, **kwargs)
    counts = [
        exchange.RowCount(leaf)
        for leaf in exchange.detached([value for _, value in found])
    ]
    return Additions(metric, [variable for variable, _ in found], counts)


def _place_of_weight(method: Callable[..., Any]) -> int | None:
    """Returns the position of `sample_weight`, `None` if it has none."""
    names = [
        parameter.name
        for parameter in inspect.signature(method).parameters.values()
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
) -> MetricUpdate:
    """Returns an update with an integer `sample_weight` as `RowCount`."""
    if _is_integer_scalar(kwargs.get("sample_weight")):
        counted = exchange.RowCount(kwargs["sample_weight"])
        kwargs = {**kwargs, "sample_weight": counted}
    elif (
        place is not None
        and place < len(args)
        and _is_integer_scalar(args[place])
    ):
        counted = exchange.RowCount(args[place])
        args = (*args[:place], counted, *args[place + 1 :])
    leaves = exchange.detached([*args, *kwargs.values()])
    return MetricUpdate(metric, update_state, args, kwargs, leaves)


def _is_integer_scalar(value: Any) -> bool:
    if value is None or exchange.is_row_shaped(value):
        return False
    return isinstance(value, int) or "int" in str(getattr(value, "dtype", ""))
