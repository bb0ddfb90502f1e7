"""Metrics see the global batch: gathered over replicas, updated once.

That is exact for any metric, whatever its state: nothing has to be known
about how states merge.
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras

from keras_dist.training.gather import exchange
from keras_dist.training.gather import mean_over_rows
from keras_dist.training.gather import merge
from keras_dist.training.gather import sum_over_replicas
from keras_dist.training.step import ReplicaStep
from keras_dist.training.step import current_step


def hook_metrics(model: keras.Model) -> None:
    """Gathers the updates of a model's metrics while it runs on replicas."""
    for metric in model.metrics:
        if "update_state" not in vars(metric):
            object.__setattr__(metric, "update_state", _hooked(metric))


def _hooked(metric: keras.metrics.Metric) -> Callable[..., Any]:
    update_state = metric.update_state
    signature = inspect.signature(update_state)

    def update_on_replicas(*args: Any, **kwargs: Any) -> Any:
        step = current_step()
        if step is None:
            return update_state(*args, **kwargs)
        return _gathered_update(
            step, metric, signature.bind(*args, **kwargs), update_state
        )

    return update_on_replicas


def _gathered_update(
    step: ReplicaStep,
    metric: keras.metrics.Metric,
    call: inspect.BoundArguments,
    update_state: Callable[..., Any],
) -> None:
    everyone = exchange(step, f"metric '{metric.name}'", dict(call.arguments))
    if step.replica.index != 0:
        return
    weights = [({"w": v.pop("sample_weight", None)}, s) for v, s in everyone]
    call.arguments.update(merge(everyone, mean_over_rows))
    if "sample_weight" in call.arguments:
        # A weight without rows is a count of rows (Keras weighs its loss by
        # it) when it is an integer.
        merged = merge(weights, _row_count_or_mean)
        call.arguments["sample_weight"] = merged["w"]
    with step.alone():
        update_state(*call.args, **call.kwargs)


def _row_count_or_mean(values: list[Any], shares: list[Any]) -> Any:
    is_integer = isinstance(values[0], int) or "int" in str(
        getattr(values[0], "dtype", "")
    )
    combine = sum_over_replicas if is_integer else mean_over_rows
    return combine(values, shares)
