"""Sums of sparse gradients, with the rows that one device would have.

A gradient has a part for each place where a model looks the variable up:

* Indices that come from rows of the batch: one device has the rows of all
  replicas, one after the other.
* Indices that are the same on each replica, as those of positions are: one
  device has them once, and each of its rows is the sum of the replicas' rows.
* Indices of which there is one each, as sparse inputs have them: one device
  has one of each index of all replicas.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import tensorflow as tf

from keras_dist_tensorflow.constant_indices import StepSizes
from keras_dist_tensorflow.constant_indices import and_not_a_row_each
from keras_dist_tensorflow.origins import SAME
from keras_dist_tensorflow.origins import Node
from keras_dist_tensorflow.origins import are_equal
from keras_dist_tensorflow.origins import depends_on_rows
from keras_dist_tensorflow.origins import through

if TYPE_CHECKING:
    from keras_dist_tensorflow.workers import TensorFlowWorkers

_ROWS = "rows"
_UNIQUE = "unique"
_COMMON = "common"


@dataclasses.dataclass(frozen=True)
class _Part:
    """The rows of one place where a variable is looked up.

    Args:
        kind: String, one of the three kinds above.
        values: Tensor.
        indices: Vector of as many.
        is_common: Whether a part of common indices is one for sure: boolean,
            or a tensor if values decide.
    """

    kind: str
    values: Any
    indices: Any
    is_common: Any = True


@dataclasses.dataclass(frozen=True)
class SparseSum:
    """A sum of sparse gradients, in parts.

    Args:
        parts: Sequence of `_Part`s.
        dense_shape: As that of `tf.IndexedSlices`.
    """

    parts: Sequence[_Part]
    dense_shape: Any

    def slices(self) -> tf.IndexedSlices:
        """The sum as one gradient."""
        parts = [_once_each(part) for part in self.parts]
        values = [part.values for part in parts]
        indices = [part.indices for part in parts]
        if len(parts) == 1:
            return tf.IndexedSlices(values[0], indices[0], self.dense_shape)
        return tf.IndexedSlices(
            tf.concat(values, axis=0),
            tf.concat(indices, axis=0),
            self.dense_shape,
        )

    @staticmethod
    def over_workers(
        sums: Sequence["SparseSum"], workers: "TensorFlowWorkers"
    ) -> "list[SparseSum]":
        """The sums of what each worker has.

        Args:
            sums: Sequence of `SparseSum`s, of as many parts on each worker.
            workers: `TensorFlowWorkers`.
        """
        sent = [
            each
            for total in sums
            for part in total.parts
            for each in _as_sent(part)
        ]
        received = iter(workers.concatenate_rows(sent))
        number = workers.cluster.num_workers
        return [
            SparseSum(
                [
                    _received(
                        part,
                        [next(received) for _ in _as_sent(part)],
                        number,
                    )
                    for part in total.parts
                ],
                total.dense_shape,
            )
            for total in sums
        ]


def summed_rows(
    gradients: Sequence[tf.IndexedSlices],
    dense_shape: Any,
    sizes: StepSizes,
    name: str,
) -> SparseSum:
    """Sums the sparse gradients of this worker's replicas.

    Args:
        gradients: Sequence with a `tf.IndexedSlices` for each replica.
        dense_shape: Of the sum.
        sizes: `StepSizes`, what is known of the replicas' rows.
        name: String, the variable's.
    """
    lists = [_split(gradient) for gradient in gradients]
    kinds = [[kind for kind, *_ in each] for each in lists]
    if any(other != kinds[0] for other in kinds):  # they took other ways
        lists = [[(_ROWS, Node(g.indices), g)] for g in gradients]
    parts = []
    for column in zip(*lists, strict=True):
        kind = column[0][0]
        terms = [(slices.values, slices.indices) for *_, slices in column]
        is_common: Any = True
        if kind == _COMMON:
            nodes = [node for _, node, _ in column]
            is_common = _are_common(nodes, terms)
            is_common = and_not_a_row_each(is_common, nodes, sizes, name)
        parts.append(_combined(kind, terms, is_common))
    return SparseSum(parts, dense_shape)


def _split(gradient: tf.IndexedSlices) -> list[tuple[str, Node, Any]]:
    """The parts of a gradient: kind, origin of the indices, and rows."""
    nodes = _places(Node(gradient.indices))
    kinds = [_kind_of(node) for node in nodes]
    if len(nodes) == 1 or (set(kinds) == {_ROWS}):
        return [(kinds[0], Node(gradient.indices), gradient)]
    sizes = [_size(node) for node in nodes]
    if any(size is None for size in sizes):
        warnings.warn(
            "A variable is looked up in several places of a `tf.function` "
            "of the model's own, by indices from the batch and by others. "
            "Its rows can't be told apart, so optimizers that square "
            "gradients give other numbers than on one device. Take the "
            "`tf.function` off: Keras compiles the whole step.",
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


def _places(start: Node) -> list[Node]:
    """The indices of each place that tapes have joined to one vector."""
    node, how = through(start, SAME)
    if how is None or how.kind != "ConcatV2":
        return [start]
    inputs = how.inputs[:-1]
    if any(each.tensor.shape.rank != 1 for each in inputs):
        return [start]
    return [place for each in inputs for place in _places(each)]


def _size(node: Node) -> Any:
    size = node.tensor.shape.num_elements()
    if size is None and not node.calls:
        return tf.size(node.tensor)
    return size


def _kind_of(node: Node) -> str:
    if not depends_on_rows(node):
        return _COMMON
    _, how = through(node, SAME)
    if how is None or not how.kind.startswith("Unique"):
        return _ROWS
    return _UNIQUE if how.output == 0 else _ROWS


def _are_common(nodes: Sequence[Node], terms: Sequence[tuple[Any, Any]]) -> Any:
    """Whether all have the same indices; some may have less of them."""
    first, *others = nodes
    if all(are_equal(first, other) for other in others):
        return True
    return _agree([indices for _, indices in terms])


def _agree(each: Sequence[Any]) -> Any:
    if len(each) == 1:
        return True
    padded = tf.stack(_padded(each, -1))
    longest = tf.reduce_max(padded, axis=0)
    same = tf.reduce_all((padded == longest) | (padded == -1))
    return bool(same) if tf.executing_eagerly() else same


def _combined(
    kind: str, terms: Sequence[tuple[Any, Any]], is_common: Any
) -> _Part:
    def joined() -> tuple[Any, Any]:
        values, indices = zip(*terms, strict=True)
        return tf.concat(values, axis=0), tf.concat(indices, axis=0)

    def summed() -> tuple[Any, Any]:
        values, indices = zip(*terms, strict=True)
        padded = _padded(indices, -1)
        if padded[0] is indices[0]:  # all are as long
            return tf.add_n(values), indices[0]
        longest = tf.reduce_max(tf.stack(padded), axis=0)
        return tf.add_n(_padded(values, 0)), longest

    if kind != _COMMON or is_common is False:
        values, indices = joined()
    elif is_common is True:
        values, indices = summed()
    else:
        values, indices = tf.cond(is_common, summed, joined)
    return _Part(kind, values, indices, is_common)


def _padded(tensors: Sequence[Any], value: Any) -> list[Any]:
    """Tensors with as many rows as the one that has most."""
    counts = [each.shape[0] for each in tensors]
    if None not in counts and len(set(counts)) == 1:
        return list(tensors)
    counts = [tf.shape(each)[0] for each in tensors]
    most = tf.reduce_max(tf.stack(counts))
    return [
        tf.pad(
            each,
            [(0, most - count)] + [(0, 0)] * (each.shape.rank - 1),
            constant_values=tf.cast(value, each.dtype),
        )
        for each, count in zip(tensors, counts, strict=True)
    ]


def _once_each(part: _Part) -> _Part:
    if part.kind != _UNIQUE:
        return part
    indices, places = tf.unique(part.indices)
    values = tf.math.unsorted_segment_sum(part.values, places, tf.size(indices))
    return _Part(_UNIQUE, values, indices)


def _as_sent(part: _Part) -> list[Any]:
    """What other workers have to know of a part."""
    if part.kind != _COMMON:
        return [part.values, part.indices]
    count = tf.shape(part.values)[:1]
    is_common = tf.reshape(tf.cast(part.is_common, tf.int32), [1])
    return [part.values, part.indices, count, is_common]


def _received(part: _Part, everyone: Sequence[Any], number: int) -> _Part:
    """A part as so many workers have it together."""
    values, indices, *more = everyone
    if not more:
        return _Part(part.kind, values, indices)
    counts, flags = more
    terms = list(
        zip(
            tf.split(values, counts, num=number),
            tf.split(indices, counts, num=number),
            strict=True,
        )
    )
    is_common = tf.reduce_all(flags == 1)
    agreed = tf.logical_and(is_common, _agree([i for _, i in terms]))
    if tf.executing_eagerly():
        agreed = bool(agreed)
    return _combined(_COMMON, terms, agreed)
