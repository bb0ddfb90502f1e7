"""Metrics whose variables are sums over rows: Keras' means and sums.

Each replica adds up its own rows. All others need the rows of all replicas.
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_dist.core import nests
from keras_dist.fit.losses import is_function_of_rows
from keras_dist.internals import keras_metrics
from keras_dist.replica.exchange import is_row_shaped

AddsUp = Callable[..., bool]


def rows_that_add_up(metric: keras.metrics.Metric) -> AddsUp:
    """Returns a function that tells whether a call of `update_state` adds up,
    given its arguments."""
    update_state = type(metric).update_state
    if update_state in (
        keras.metrics.Mean.update_state,
        keras.metrics.Sum.update_state,
    ):
        return _are_rows
    if isinstance(metric, keras_metrics.CompileMetrics):
        adds_up = _once_for_shapes(_of_compiled, metric)
        return lambda *args, **options: (
            metric.built and adds_up(*args, **options)
        )
    if update_state is keras.metrics.MeanMetricWrapper.update_state:
        return _once_for_shapes(_of_function, metric)
    return _never


def numbers_that_add_up(metric: keras.metrics.Metric) -> AddsUp:
    """Returns a function that tells whether a call of `update_state` is given
    a number that is a sum, or one with a weight that is a number of rows."""
    update_state = type(metric).update_state
    if update_state is keras.metrics.Sum.update_state:
        return lambda values, sample_weight=None: not is_row_shaped(values)
    if update_state is keras.metrics.Mean.update_state:
        return lambda values, sample_weight=None: (
            not is_row_shaped(values) and _is_count(sample_weight)
        )
    return _never


def _is_count(weight: object) -> bool:
    """Returns whether a weight is a number that was computed from rows."""
    if isinstance(weight, int):
        return not isinstance(weight, bool)
    return ops.is_tensor(weight) and not is_row_shaped(weight)


def _once_for_shapes(
    find_out: Callable[[Any, Any, Any], bool], metric: keras.Metric
) -> AddsUp:
    known: dict[Any, bool] = {}

    def adds_up(
        y_true: object, y_pred: object, sample_weight: object = None
    ) -> bool:
        leaves = nests.leaves_of([y_true, y_pred, sample_weight])
        # By a list: each step comes here, and a generator costs a call a leaf.
        key = tuple(
            [
                None
                if leaf is None
                else is_row_shaped(leaf) and tuple(leaf.shape[1:])
                for leaf in leaves
            ]
        )
        if False in key:
            return False
        if key not in known:
            known[key] = find_out(metric, y_true, y_pred)
        return known[key]

    return adds_up


def _of_compiled(metric: keras.Metric, y_true: object, y_pred: object) -> bool:
    return all(
        rows_that_add_up(part)(*pair)
        for part, *pair in keras_metrics.compiled_pairs(metric, y_true, y_pred)
    )


def _of_function(metric: Any, y_true: Any, y_pred: Any) -> bool:
    fn, options = keras_metrics.function_of(metric)
    # Along another axis, a function may couple rows.
    if not (
        inspect.isfunction(fn)
        and is_function_of_rows(fn)
        and options.get("axis", -1) == -1
    ):
        return False
    # Of one axis, for instance, a function takes the mean.
    values = fn(y_true, y_pred, **options)
    return is_row_shaped(values) and values.shape[0] == y_pred.shape[0]


def _never(*args: Any, **kwargs: Any) -> bool:
    return False


def _are_rows(values: object, sample_weight: object = None) -> bool:
    has_weights = sample_weight is None or is_row_shaped(sample_weight)
    return has_weights and is_row_shaped(values)
