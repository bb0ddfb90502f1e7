"""Metrics see the global batch: gathered over replicas, updated once.

That is exact for any metric, whatever its state: nothing has to be known
about how states merge.
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras

from keras_dist.training import keras_internals
from keras_dist.training.join import detached
from keras_dist.training.join import is_row_shaped
from keras_dist.training.join import join
from keras_dist.training.join import mean_over_rows
from keras_dist.training.join import sum_over_replicas
from keras_dist.training.shares import Share
from keras_dist.training.step import ReplicaStep
from keras_dist.training.step import current_step


def hook_metrics(model: keras.Model) -> None:
    """Gathers the updates of a model's metrics while it runs on replicas."""
    for metric in keras_internals.all_metrics(model):
        if "update_state" not in vars(metric):
            object.__setattr__(metric, "update_state", _hooked(metric))


def _hooked(metric: keras.metrics.Metric) -> Callable[..., Any]:
    update_state = metric.update_state
    parameters = list(inspect.signature(update_state).parameters)

    def update_on_replicas(*args: Any, **kwargs: Any) -> Any:
        step = current_step()
        if step is None:
            return update_state(*args, **kwargs)
        if len(args) > 1 and parameters[len(args) - 1] == "sample_weight":
            kwargs["sample_weight"] = args[-1]
            args = args[:-1]
        _gathered_update(step, metric, update_state, args, kwargs)
        return None

    return update_on_replicas


def _gathered_update(
    step: ReplicaStep,
    metric: keras.metrics.Metric,
    update_state: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if _is_integer_scalar(kwargs.get("sample_weight")):
        kwargs["sample_weight"] = _RowCount(kwargs["sample_weight"])
    passed = [*args, *kwargs.values()]

    def update(everyone: list[Any]) -> None:
        merged = join(passed, everyone, _combine)
        named = zip(kwargs, merged[len(args) :], strict=True)
        update_state(*merged[: len(args)], **dict(named))

    own = (detached(passed), step.share)
    step.replica.meet(f"metric '{metric.name}'", update, own)
    step.forget(metric.variables)


class _RowCount:
    """A weight that says how many rows a value is of, as Keras' trainer
    gives to its running loss."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows


def _combine(values: list[Any], shares: list[Share]) -> Any:
    if isinstance(values[0], _RowCount):
        return sum_over_replicas([value.rows for value in values], shares)
    return mean_over_rows(values, shares)


def _is_integer_scalar(value: Any) -> bool:
    if value is None or is_row_shaped(value):
        return False
    return isinstance(value, int) or "int" in str(getattr(value, "dtype", ""))
