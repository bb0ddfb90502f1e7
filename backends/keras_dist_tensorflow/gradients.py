"""Sums of gradients over replicas."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import tensorflow as tf

from keras_dist_tensorflow.constant_indices import StepSizes
from keras_dist_tensorflow.sparse_sums import SparseSum
from keras_dist_tensorflow.sparse_sums import summed_rows

if TYPE_CHECKING:
    from keras_dist_tensorflow.workers import TensorFlowWorkers


def weighted_sum(
    gradients: Sequence[Sequence[Any]],
    weights: Sequence[Any],
    sizes: StepSizes,
    names: Sequence[str],
) -> list[Any]:
    """Sums each variable's gradients, weighted by replica.

    A weight of zero drops a replica's gradient even if it is NaN.

    Args:
        gradients: For each replica, its gradients, dense or
            `tf.IndexedSlices`, `None` where it has none.
        weights: For each replica, a float or float scalar tensor.
        sizes: `StepSizes`, the known numbers of the replicas' rows.
        names: Sequence of the variables' names, for warnings.

    Returns:
        List with a gradient for each variable, `None` where no replica has
        one; a `SparseSum` where all replicas have sparse ones.
    """
    return [
        _sum(
            [
                (g, w)
                for g, w in zip(each, weights, strict=True)
                if g is not None
            ],
            sizes,
            name,
        )
        for name, *each in zip(names, *gradients, strict=True)
    ]


def finished(
    gradients: Sequence[Any], workers: "TensorFlowWorkers | None"
) -> list[Any]:
    """Sums the results of `weighted_sum` over workers.

    Returns gradients as an optimizer takes them. Sparse ones are
    `tf.IndexedSlices` with the rows that one device's would have.
    """
    results = list(gradients)
    sparse = [
        place
        for place, gradient in enumerate(gradients)
        if isinstance(gradient, SparseSum)
    ]
    if workers is not None:
        dense = [
            place
            for place, gradient in enumerate(gradients)
            if gradient is not None and place not in sparse
        ]
        totals = workers.sum_gradients([gradients[place] for place in dense])
        for place, total in zip(dense, totals, strict=True):
            results[place] = total
        sums = SparseSum.over_workers([results[p] for p in sparse], workers)
        for place, total in zip(sparse, sums, strict=True):
            results[place] = total
    for place in sparse:
        results[place] = results[place].slices()
    return results


def _sum(terms: list[tuple[Any, Any]], sizes: StepSizes, name: str) -> Any:
    if not terms:
        return None
    if all(isinstance(gradient, tf.IndexedSlices) for gradient, _ in terms):
        return summed_rows(
            [
                tf.IndexedSlices(_weighted(g.values, w), g.indices)
                for g, w in terms
            ],
            terms[0][0].dense_shape,
            sizes,
            name,
        )
    return tf.add_n([_weighted(tf.convert_to_tensor(g), w) for g, w in terms])


def _weighted(gradient: Any, weight: Any) -> Any:
    if isinstance(weight, float) and weight == 1.0:
        return gradient
    if isinstance(weight, float) and weight:
        return gradient * tf.cast(weight, gradient.dtype)
    weight = tf.cast(weight, gradient.dtype)
    return tf.math.multiply_no_nan(gradient, weight)
