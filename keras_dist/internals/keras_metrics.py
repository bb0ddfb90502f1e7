"""A door to Keras' private names: how metrics come to their states.

| name | why |
|---|---|
| `keras.metrics.MeanMetricWrapper._fn`, `_fn_kwargs` | treats rows one by one |
| `keras.src.trainers.compile_utils.CompileMetrics` | those of `compile` |
| its `_flatten_y` | their arguments |
| its `_flat_metrics`, `_flat_weighted_metrics` | lists for each output |
"""

from typing import Any

import keras

from keras_dist.internals.private_names import private

CompileMetrics = private("keras.src.trainers.compile_utils.CompileMetrics")


def function_of(metric: keras.Metric) -> tuple[Any, dict[str, Any]]:
    """Returns the function of a `MeanMetricWrapper`, and its options."""
    return metric._fn, metric._fn_kwargs


def compiled_pairs(
    compiled: Any, y_true: Any, y_pred: Any
) -> list[tuple[keras.metrics.Metric, Any, Any]]:
    """Returns the metrics of `compile`, each with its targets and outputs."""
    targets, outputs = map(compiled._flatten_y, (y_true, y_pred))
    both = (compiled._flat_metrics, compiled._flat_weighted_metrics)
    return [
        (metric, *pair)
        for lists in both
        for of_output, *pair in zip(lists, targets, outputs, strict=False)
        for metric in (of_output.metrics if of_output else ())
    ]
