"""Sums of gradients over replicas and workers.

A sparse gradient has a part for each lookup of the variable, of three kinds:
rows, whose indices come from the batch, are concatenated; common indices are
the same on each replica, and their rows are summed; unique indices were made
distinct by the model, and the sum has each once.
"""

import warnings
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from keras_dist.plugins import in_packs
from keras_dist_tensorflow import runtime_internals
from keras_dist_tensorflow.origins import Kind
from keras_dist_tensorflow.origins import Owner
from keras_dist_tensorflow.origins import StepSizes
from keras_dist_tensorflow.origins import origin_of
from keras_dist_tensorflow.origins import owner_of
from keras_dist_tensorflow.workers import TensorFlowWorkers


def weighted_sum(
    gradients: Sequence[Any],
    weights: Sequence[Any],
    sizes: StepSizes,
    name: str,
) -> Any:
    """Sums replicas' gradients of the variable `name`; some may be `None`."""
    terms = [
        (gradient, weight)
        for gradient, weight in zip(gradients, weights, strict=True)
        if gradient is not None
    ]
    if not terms:
        return None
    if all(isinstance(gradient, tf.IndexedSlices) for gradient, _ in terms):
        weighted = [
            tf.IndexedSlices(_weighted(g.values, w), g.indices)
            for g, w in terms
        ]
        return _summed_rows(weighted, terms[0][0].dense_shape, sizes, name)
    return tf.add_n([_weighted(tf.convert_to_tensor(g), w) for g, w in terms])


def _weighted(gradient: Any, weight: Any) -> Any:
    if isinstance(weight, float) and weight == 1.0:
        return gradient
    if isinstance(weight, float) and weight:
        return gradient * tf.cast(weight, gradient.dtype)
    weight = tf.cast(weight, gradient.dtype)
    # A weight of zero drops a gradient even if it is NaN.
    return tf.math.multiply_no_nan(gradient, weight)


def sum_over_workers(
    sums: Sequence[Any], workers: TensorFlowWorkers | None
) -> list[Any]:
    """Sums results of `weighted_sum` over workers, for an optimizer."""
    if workers is not None:
        there = [i for i, total in enumerate(sums) if total is not None]
        sparse = [i for i in there if isinstance(sums[i], SparseSum)]
        dense = [i for i in there if i not in sparse]
        wire = workers.options.dtype
        sums = in_packs(lambda pack: workers.sum(pack, wire), [dense], sums)
        sums = in_packs(
            lambda pack: SparseSum.over_workers(pack, workers), [sparse], sums
        )
    return [
        total.slices() if isinstance(total, SparseSum) else total
        for total in sums
    ]


class _Part(NamedTuple):
    """The rows that one lookup of a variable adds to its gradient."""

    kind: Kind
    values: Any
    indices: Any
    # Of common indices: each replica's number of them, and whose they are.
    counts: Any = None
    owner: Any = Owner.BATCH


class SparseSum(NamedTuple):
    """A sum of sparse gradients, in parts."""

    parts: Sequence[_Part]
    dense_shape: Any

    def slices(self) -> tf.IndexedSlices:
        values, indices = zip(*map(_finished, self.parts), strict=True)
        return tf.IndexedSlices(
            _joined(values), _joined(indices), self.dense_shape
        )

    @staticmethod
    def over_workers(
        sums: Sequence["SparseSum"], workers: TensorFlowWorkers
    ) -> "list[SparseSum]":
        """Sums over workers; each has equally many sums, of as many parts."""
        sums = [
            total._replace(parts=[*map(_summed_here, total.parts)])
            for total in sums
        ]
        sent = [_as_sent(part) for total in sums for part in total.parts]
        received = iter(workers.concatenate_rows(sum(sent, [])))
        return [
            SparseSum(
                [
                    _Part(part.kind, *[next(received) for _ in _as_sent(part)])
                    for part in total.parts
                ],
                total.dense_shape,
            )
            for total in sums
        ]


def _summed_rows(
    gradients: Sequence[tf.IndexedSlices],
    dense_shape: object,
    sizes: StepSizes,
    name: str,
) -> SparseSum:
    """Sums this worker's sparse gradients of the variable `name`."""
    lists = [_split(gradient) for gradient in gradients]
    kinds = [[kind for kind, *_ in entries] for entries in lists]
    if any(other != kinds[0] for other in kinds):  # replicas differ in lookups
        lists = [[(Kind.ROWS, None, g)] for g in gradients]
    parts = []
    for column in zip(*lists, strict=True):
        values = [slices.values for *_, slices in column]
        indices = [slices.indices for *_, slices in column]
        part = _Part(column[0][0], _joined(values), _joined(indices))
        if part.kind is Kind.COMMON:
            counts = tf.stack([tf.shape(tensor)[0] for tensor in indices])
            owner = owner_of([vector for _, vector, _ in column], sizes, name)
            part = part._replace(counts=counts, owner=owner)
        parts.append(part)
    return SparseSum(parts, dense_shape)


def _split(gradient: tf.IndexedSlices) -> list[tuple[Kind, Any, Any]]:
    """Splits a gradient into parts: kind, origin of the indices, and rows."""
    whole = gradient.indices
    vectors = origin_of(whole).parts or (whole,)
    kinds = [_kind_of(vector) for vector in vectors]
    if len(vectors) == 1 or set(kinds) == {Kind.ROWS}:
        return [(kinds[0], whole, gradient)]
    sizes = [_size(vector) for vector in vectors]
    if any(size is None for size in sizes):
        warnings.warn(
            "A variable is looked up in several places of the model's own "
            "`tf.function`, by indices from the batch and by other indices. "
            "The gradients of the two can't be told apart, so optimizers "
            "that square gradients give different numbers from those of one "
            "device. Remove the `tf.function`: Keras compiles the whole step.",
            stacklevel=2,
        )
        return [(Kind.ROWS, whole, gradient)]
    parts = map(
        tf.IndexedSlices,
        tf.split(gradient.values, sizes),
        tf.split(whole, sizes),
    )
    return list(zip(kinds, vectors, parts, strict=True))


def _kind_of(indices: object) -> Kind:
    kind = origin_of(indices).kind
    return Kind.ROWS if kind is Kind.SHAPE else kind


def _size(vector: Any) -> Any:
    size = vector.shape.num_elements()
    if size is None and runtime_internals.is_in_this_graph(vector):
        return tf.size(vector)
    return size


def _joined(tensors: Sequence[Any]) -> Any:
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, axis=0)


def _of_each(rows: Any, counts: Any, default: int) -> Any:
    """Adds a leading axis of replicas, padded to the longest one's rows."""
    ragged = tf.RaggedTensor.from_row_lengths(rows, counts, validate=False)
    return ragged.to_tensor(tf.cast(default, rows.dtype))


def _finished(part: _Part) -> tuple[Any, Any]:
    """Returns the rows and indices that one device would have."""
    joined = part.values, part.indices
    if part.kind is Kind.UNIQUE:
        indices, places = tf.unique(part.indices)
        size = tf.size(indices)
        return tf.math.unsorted_segment_sum(part.values, places, size), indices
    if part.kind is Kind.ROWS:
        return joined
    is_once = tf.reduce_max(part.owner) != int(Owner.ROWS)
    return _once_if(is_once, part)[:2]


def _summed_here(part: _Part) -> _Part:
    """Sums the rows of this worker's replicas that one device has once."""
    if part.kind is not Kind.COMMON:
        return part
    # Of all workers' owners the largest counts, which is this one.
    is_once = tf.equal(part.owner, int(Owner.BATCH))
    values, indices, counts = _once_if(is_once, part)
    return part._replace(values=values, indices=indices, counts=counts)


def _once_if(is_once: object, part: _Part) -> tuple[Any, Any, Any]:
    """Returns rows, indices and counts, summed if replicas have the same."""
    joined = part.values, part.indices, part.counts
    if part.counts.shape[0] == 1:
        return joined
    by_replica = _of_each(part.indices, part.counts, -1)
    longest = tf.reduce_max(by_replica, axis=0)
    # They differ if they were computed from the replica's id.
    are_same = tf.reduce_all((by_replica == longest) | (by_replica == -1))

    def summed() -> tuple[Any, Any, Any]:
        values = tf.reduce_sum(_of_each(part.values, part.counts, 0), axis=0)
        return values, longest, tf.shape(longest)

    result: tuple[Any, Any, Any] = tf.cond(
        are_same & is_once, summed, lambda: joined
    )
    return result


def _as_sent(part: _Part) -> list[Any]:
    sent = [part.values, part.indices]
    if part.kind is Kind.COMMON:
        owner = tf.reshape(tf.cast(part.owner, tf.int32), [1])
        sent += [part.counts, owner]
    return sent
