"""Splits of a global batch into the rows of each replica."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import tree

from keras_dist.plugins import OwnRows
from keras_dist.plugins import Places
from keras_dist.plugins import RowShard
from keras_dist.plugins import UnequalLengths
from keras_dist.plugins import bounds


def cut_batch(
    batch: object,
    parts: int,
    local_parts: slice = slice(None),
    unequal: UnequalLengths | None = None,
    places: Places | None = None,
) -> tuple[list[Any], list[RowShard], list[Any]]:
    """Splits a batch into rows for each of the replicas in `local_parts`.

    Returns the parts, their shares, and all replicas' first rows with the end.
    """
    leaves = tree.flatten(batch)
    # One tensor for all, so that they are known to be equal.
    own = next((x.total for x in leaves if isinstance(x, OwnRowsTensor)), None)
    rows = [
        own if isinstance(leaf, OwnRowsTensor) else _row_count(leaf)
        for leaf in leaves
    ]
    known = [n for n in rows if n is not None]
    if not known:
        raise ValueError(
            "A batch must hold at least one array with rows along axis 0. "
            f"Received: {batch!r}."
        )
    total = known[0]
    alike = _all_equal(known)
    if unequal is not None and parts > 1:
        _tell_unless(alike, known, unequal)
    # If the numbers of rows differ, replica 0 has all of them.
    edges = [
        edge if index == 0 else _where(alike, edge, total)
        for index, edge in enumerate(bounds(total, parts))
    ]
    if places is not None and tf.executing_eagerly():
        places.is_open = not places.shift(edges) and places.is_open
    shares = []
    cuts = []
    pairs = list(zip(edges[:-1], edges[1:], strict=True))
    for start, stop in pairs[local_parts]:
        rows_here = stop - start
        # Replicas without rows take part in rendezvous, on the first row.
        begin = _where(rows_here > 0, start, 0)
        end = _where(rows_here > 0, stop, 1)
        shares.append(RowShard(rows_here, total, begin))
        cut = [
            leaf.part(start, stop)
            if isinstance(leaf, OwnRowsTensor)
            else leaf
            if n is None
            else _rows(leaf, n, _where(alike, begin, 0), _where(alike, end, n))
            for leaf, n in zip(leaves, rows, strict=True)
        ]
        cuts.append(tree.pack_sequence_as(batch, cut))
    return cuts, shares, edges


def _all_equal(counts: list[Any]) -> Any:
    """Returns whether row counts are equal, a tensor if not known yet."""
    if all(n is counts[0] for n in counts):
        return True
    known = {n for n in counts if isinstance(n, int)}
    if len(known) > 1:
        return False
    if len(known) == 1 and all(isinstance(n, int) for n in counts):
        return True
    return tf.reduce_all([tf.equal(n, counts[0]) for n in counts[1:]])


def _tell_unless(
    alike: object, counts: list[Any], unequal: UnequalLengths
) -> None:
    def tell(*numbers: Any) -> None:
        unequal.tell([int(n) for n in numbers], on_each=False)

    def tell_in_graph() -> Any:
        tf.py_function(tell, counts, [])
        return False

    if not isinstance(alike, bool):
        # The numbers of rows are known only while the graph runs.
        tf.cond(alike, lambda: True, tell_in_graph)
    elif not alike:
        tell(*(n for n in counts if isinstance(n, int)))


def _where(condition: object, if_true: object, if_false: object) -> Any:
    if isinstance(condition, bool):
        return if_true if condition else if_false
    return tf.where(condition, if_true, if_false)


def _row_count(leaf: Any) -> Any:
    """Returns a leaf's rows: an integer, a scalar tensor, or `None`."""
    if getattr(leaf, "shape", None) is None:
        return None
    shape = tf.TensorShape(leaf.shape)
    if shape.rank == 0:
        return None
    if shape.rank is not None and shape[0] is not None:
        return int(shape[0])
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def _rows(leaf: Any, count: Any, begin: Any, end: Any) -> Any:
    is_static = all(isinstance(n, int) for n in (count, begin, end))
    if is_static and (begin, end) == (0, count):
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        rank = leaf.shape.rank
        first = tf.cast(tf.reshape(begin, [1]), tf.int64)
        size = tf.cast(tf.reshape(end - begin, [1]), tf.int64)
        starts = tf.concat([first, tf.zeros([rank - 1], tf.int64)], axis=0)
        sizes = tf.concat([size, leaf.dense_shape[1:]], axis=0)
        part = tf.sparse.slice(leaf, starts, sizes)
        static = tf.get_static_value(end - begin)
        part.set_shape([static, *leaf.shape.as_list()[1:]])
        return part
    return leaf[begin:end]


class OwnRowsTensor(tf.experimental.ExtensionType):
    """An array of a global batch, of which this worker has its own rows only.

    A part of a `tf.data` element, like a tensor with the global batch's shape.
    """

    rows: tf.Tensor
    # The place of the first row; the global batch's rows, and a checksum of it.
    first: tf.Tensor
    total: tf.Tensor
    code: tf.Tensor

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape([None]).concatenate(self.rows.shape[1:])

    @property
    def dtype(self) -> tf.DType:
        return self.rows.dtype

    def part(self, start: Any, stop: Any) -> tf.Tensor:
        """Returns rows of the global batch, without any some own row."""
        count = stop - start
        begin = tf.where(count > 0, start - self.first, 0)
        # Unlike a slice in brackets, this fails if rows are not here.
        rest = self.rows.shape.rank - 1
        starts = tf.concat([[begin], tf.zeros([rest], tf.int32)], axis=0)
        sizes = tf.concat([[tf.maximum(count, 1)], tf.fill([rest], -1)], axis=0)
        rows = tf.slice(self.rows, starts, sizes)
        rows.set_shape(self.shape)
        return rows


def in_memory(element: object) -> Any:
    """Returns an element in memory with own rows as arrays or `OwnRows`."""

    def shown(leaf: Any) -> Any:
        if not isinstance(leaf, OwnRowsTensor):
            return leaf
        total = int(leaf.total)
        if leaf.rows.shape[0] == total:
            return leaf.rows
        return OwnRows(leaf.rows, int(leaf.first), total, int(leaf.code))

    return tree.map_structure(shown, element)


class FirstSeen:
    """A dataset that calls `see` with its first element, or with `None`."""

    def __init__(
        self, dataset: tf.data.Dataset, see: Callable[[Any], None]
    ) -> None:
        self._dataset = dataset
        self._see = see

    def __iter__(self) -> Any:
        # One pass: a second one would shuffle anew, or exhaust a generator.
        iterator = iter(self._dataset)
        first = iterator.get_next_as_optional()
        if not first.has_value():
            self._see(None)
            return iterator
        self._see(in_memory(first.get_value()))
        rest = (
            tf.data.Dataset.counter()
            .map(lambda _: iterator.get_next_as_optional())
            .take_while(lambda element: element.has_value())
            .map(lambda element: element.get_value())
        )
        seen = tf.data.Dataset.from_tensors(first.get_value())
        return iter(seen.concatenate(rest))
