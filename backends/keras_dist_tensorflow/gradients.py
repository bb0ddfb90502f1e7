"""Sums of gradients over replicas and workers.

A sparse gradient has a part for each lookup of the variable, of three kinds:
rows, whose indices come from the batch, are concatenated; common indices are
the same on each replica, and their rows are summed; unique indices were made
distinct by the model, and the sum has each once.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist.core.packing import in_packs
from keras_dist_tensorflow.origins import SAME
from keras_dist_tensorflow.origins import OriginNode
from keras_dist_tensorflow.origins import Owner
from keras_dist_tensorflow.origins import StepSizes
from keras_dist_tensorflow.origins import are_equal
from keras_dist_tensorflow.origins import depends_on_rows
from keras_dist_tensorflow.origins import owner_of
from keras_dist_tensorflow.origins import through
from keras_dist_tensorflow.workers import TensorFlowWorkers

_ROWS = "rows"
_UNIQUE = "unique"
_COMMON = "common"


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
        there = [i for i, each in enumerate(sums) if each is not None]
        sparse = [i for i in there if isinstance(sums[i], SparseSum)]
        dense = [i for i in there if i not in sparse]
        wire = workers.options.dtype
        sums = in_packs(lambda own: workers.sum(own, wire), [dense], sums)
        sums = in_packs(
            lambda own: SparseSum.over_workers(own, workers), [sparse], sums
        )
    return [
        each.slices() if isinstance(each, SparseSum) else each for each in sums
    ]


@dataclasses.dataclass(frozen=True)
class _Part:
    """The rows that one lookup of a variable adds to its gradient."""

    kind: str
    values: Any
    indices: Any
    # Of common indices: each replica's number of them, and whose they are.
    counts: Any = None
    owner: Any = Owner.BATCH


@dataclasses.dataclass(frozen=True)
class SparseSum:
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
        sent = [
            each
            for total in sums
            for part in total.parts
            for each in _as_sent(part)
        ]
        received = iter(workers.concatenate_rows(sent))
        return [
            SparseSum(
                [
                    _received(part, [next(received) for _ in _as_sent(part)])
                    for part in total.parts
                ],
                total.dense_shape,
            )
            for total in sums
        ]


def _summed_rows(
    gradients: Sequence[tf.IndexedSlices],
    dense_shape: Any,
    sizes: StepSizes,
    name: str,
) -> SparseSum:
    """Sums this worker's sparse gradients of the variable `name`."""
    lists = [_split(gradient) for gradient in gradients]
    kinds = [[kind for kind, *_ in each] for each in lists]
    if any(other != kinds[0] for other in kinds):  # replicas differ in lookups
        lists = [[(_ROWS, OriginNode(g.indices), g)] for g in gradients]
    parts = []
    for column in zip(*lists, strict=True):
        kind = column[0][0]
        values = [slices.values for *_, slices in column]
        indices = [slices.indices for *_, slices in column]
        part = _Part(kind, _joined(values), _joined(indices))
        if kind == _COMMON:
            nodes = [node for _, node, _ in column]
            part = _common_part(nodes, values, indices, sizes, name)
        parts.append(part)
    return SparseSum(parts, dense_shape)


def _split(gradient: tf.IndexedSlices) -> list[tuple[str, OriginNode, Any]]:
    """Splits a gradient into parts: kind, origin of the indices, and rows."""
    nodes = _places(OriginNode(gradient.indices))
    kinds = [_kind_of(node) for node in nodes]
    if len(nodes) == 1 or (set(kinds) == {_ROWS}):
        return [(kinds[0], OriginNode(gradient.indices), gradient)]
    sizes = [_size(node) for node in nodes]
    if any(size is None for size in sizes):
        warnings.warn(
            "A variable is looked up in several places of the model's own "
            "`tf.function`, by indices from the batch and by other indices. "
            "The gradients of the two can't be told apart, so optimizers "
            "that square gradients give different numbers from those of one "
            "device. Remove the `tf.function`: Keras compiles the whole step.",
            stacklevel=2,
        )
        return [(_ROWS, nodes[0], gradient)]
    return [
        (kind, node, tf.IndexedSlices(values, indices))
        for kind, node, values, indices in zip(
            kinds,
            nodes,
            tf.split(gradient.values, sizes),
            tf.split(gradient.indices, sizes),
            strict=True,
        )
    ]


def _places(start: OriginNode) -> list[OriginNode]:
    """Returns the indices of each lookup, which tapes concatenate."""
    node, how = through(start, SAME)
    if how is None or how.kind != "ConcatV2":
        return [start]
    inputs = how.inputs[:-1]
    if any(each.tensor.shape.rank != 1 for each in inputs):
        return [start]
    return [place for each in inputs for place in _places(each)]


def _size(node: OriginNode) -> Any:
    size = node.tensor.shape.num_elements()
    if size is None and not node.calls:
        return tf.size(node.tensor)
    return size


def _kind_of(node: OriginNode) -> str:
    if not depends_on_rows(node):
        return _COMMON
    _, how = through(node, SAME)
    if how is None or not how.kind.startswith("Unique"):
        return _ROWS
    return _UNIQUE if how.output == 0 else _ROWS


def _common_part(
    nodes: Sequence[OriginNode],
    values: Sequence[Any],
    indices: Sequence[Any],
    sizes: StepSizes,
    name: str,
) -> _Part:
    """Sums the rows of indices that are not computed from the batch."""
    counts = tf.stack([tf.shape(each)[0] for each in indices])
    owner = owner_of(nodes, sizes, name)
    if any(not are_equal(nodes[0], other) for other in nodes[1:]):
        owner = _unless_they_differ(owner, _joined(indices), counts)
    elif owner is Owner.BATCH:
        lengths = {vector.shape[0] for vector in indices}
        if len(lengths) == 1 and None not in lengths:
            total = tf.add_n(list(values))
            return _Part(_COMMON, total, indices[0], counts[:1])
    return _Part(_COMMON, _joined(values), _joined(indices), counts, owner)


def _joined(tensors: Sequence[Any]) -> Any:
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, axis=0)


def _unless_they_differ(owner: Any, indices: Any, counts: Any) -> Any:
    """Returns the owner, or `REPLICA` if replicas have other indices."""
    padded = _of_each(indices, counts, -1)
    longest = tf.reduce_max(padded, axis=0)
    are_same = tf.reduce_all((padded == longest) | (padded == -1))
    return tf.where(are_same, _number(owner), int(Owner.REPLICA))


def _of_each(rows: Any, counts: Any, default: int) -> Any:
    """Adds a leading axis of replicas, padded to the longest one's rows."""
    ragged = tf.RaggedTensor.from_row_lengths(rows, counts, validate=False)
    return ragged.to_tensor(tf.cast(default, rows.dtype))


def _number(owner: Any) -> Any:
    return tf.cast(int(owner) if isinstance(owner, Owner) else owner, tf.int32)


def _finished(part: _Part) -> tuple[Any, Any]:
    """Returns the rows and indices that one device would have."""
    if part.kind == _UNIQUE:
        indices, places = tf.unique(part.indices)
        size = tf.size(indices)
        return tf.math.unsorted_segment_sum(part.values, places, size), indices
    if part.kind == _ROWS:
        return part.values, part.indices

    def summed() -> tuple[Any, Any]:
        values = _of_each(part.values, part.counts, 0)
        indices = _of_each(part.indices, part.counts, -1)
        return tf.reduce_sum(values, axis=0), tf.reduce_max(indices, axis=0)

    joined = part.values, part.indices
    if part.owner is Owner.ROWS or part.counts.shape[0] == 1:
        return joined
    owner = _number(part.owner)
    is_common = (owner == int(Owner.BATCH)) | (owner == int(Owner.UNKNOWN))
    rows, indices = tf.cond(is_common, summed, lambda: joined)
    return rows, indices


def _as_sent(part: _Part) -> list[Any]:
    sent = [part.values, part.indices]
    if part.kind == _COMMON:
        sent += [part.counts, tf.reshape(_number(part.owner), [1])]
    return sent


def _received(part: _Part, everyone: Sequence[Any]) -> _Part:
    """Makes a part of the concatenated tensors of all workers."""
    values, indices, *more = everyone
    if not more:
        return _Part(part.kind, values, indices)
    counts, owners = more
    owner = _unless_they_differ(tf.reduce_max(owners), indices, counts)
    return _Part(_COMMON, values, indices, counts, owner)
