"""Sums of gradients over replicas."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import tensorflow as tf

if TYPE_CHECKING:
    from keras_dist_tensorflow.workers import TensorFlowWorkers


def weighted_sum(
    gradients: Sequence[Sequence[Any]], weights: Sequence[Any]
) -> list[Any]:
    """Sums each variable's gradients, weighted by replica.

    A weight of zero silences a replica, NaN included.

    Args:
        gradients: For each replica, its gradients, `None` where it has none.
            Dense, or `tf.IndexedSlices`.
        weights: For each replica, a float or float scalar tensor.

    Returns:
        List with a gradient for each variable, `None` where no replica has
        one; sparse where one device's would have the same rows.
    """
    return [
        _sum(
            [
                (g, w)
                for g, w in zip(each, weights, strict=True)
                if g is not None
            ]
        )
        for each in zip(*gradients, strict=True)
    ]


def summed_over_workers(
    gradients: Sequence[Any], workers: "TensorFlowWorkers"
) -> list[Any]:
    """Sums of what each worker has summed over its replicas.

    Args:
        gradients: Sequence with a gradient for each variable, or `None`.
            Lists of rows stay that, with the rows of all workers in order.
        workers: `TensorFlowWorkers`.
    """
    results = list(gradients)
    sparse = [
        place
        for place, gradient in enumerate(gradients)
        if isinstance(gradient, tf.IndexedSlices)
    ]
    dense = [
        place
        for place, gradient in enumerate(gradients)
        if gradient is not None and place not in sparse
    ]
    totals = workers.sum_gradients([gradients[place] for place in dense])
    for place, total in zip(dense, totals, strict=True):
        results[place] = total
    rows = workers.concatenate_rows(
        [
            part
            for place in sparse
            for part in (gradients[place].values, gradients[place].indices)
        ]
    )
    for place, values, indices in zip(
        sparse, rows[::2], rows[1::2], strict=True
    ):
        shape = gradients[place].dense_shape
        results[place] = tf.IndexedSlices(values, indices, shape)
    return results


def _sum(terms: list[tuple[Any, Any]]) -> Any:
    if not terms:
        return None
    if all(_is_list_of_rows(gradient) for gradient, _ in terms):
        # Rows in replica order: those that one device would have had.
        first = terms[0][0]
        return tf.IndexedSlices(
            tf.concat([_weighted(g.values, w) for g, w in terms], axis=0),
            tf.concat([g.indices for g, _ in terms], axis=0),
            first.dense_shape,
        )
    return tf.add_n([_weighted(tf.convert_to_tensor(g), w) for g, w in terms])


def _is_list_of_rows(gradient: Any) -> bool:
    """Whether the replicas' rows, one after the other, are one device's.

    Where TensorFlow has added up equal indices, which shows in the graph,
    they are not: an optimizer's squares of them would differ.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return False
    tensor = gradient.indices
    while not tf.executing_eagerly():
        if tensor.op.type.startswith("Unique"):
            return False
        if tensor.op.type not in ("Reshape", "Identity", "Cast"):
            break
        tensor = tensor.op.inputs[0]
    return True


def _weighted(gradient: Any, weight: Any) -> Any:
    if isinstance(weight, float) and weight == 1.0:
        return gradient
    if isinstance(weight, float) and weight:
        return gradient * tf.cast(weight, gradient.dtype)
    weight = tf.cast(weight, gradient.dtype)
    return tf.math.multiply_no_nan(gradient, weight)
