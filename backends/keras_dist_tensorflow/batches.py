"""Cutting a global batch into the rows of each replica."""

from typing import Any

import tensorflow as tf
from keras import tree

from keras_dist.training.shares import Share
from keras_dist.training.shares import bounds


def cut_batch(batch: Any, parts: int) -> tuple[list[Any], list[Share]]:
    """The rows of each replica, in order.

    A replica whose share is empty gets the first row all the same, because
    every replica takes part in every meeting; its share says that the row
    counts nowhere.

    Args:
        batch: Nested structure of arrays, tensors, ragged or sparse tensors.
            Leaves that do not have as many rows as the first one that has
            any are given to each replica whole.
        parts: Integer, number of replicas.

    Returns:
        Tuple of a list of nested structures like `batch`, and a list of
        `Share`s.

    Raises:
        ValueError: If there are no rows.
    """
    leaves = tree.flatten(batch)
    rows = [_row_count(leaf) for leaf in leaves]
    total = next((n for n in rows if n is not None), None)
    if total is None:
        raise ValueError(
            "A batch must hold at least one array with rows along axis 0. "
            f"Received: {batch!r}."
        )
    edges = bounds(total, parts)
    shares = []
    cuts = []
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        own = stop - start
        shares.append(Share(own, total))
        if isinstance(own, int):
            begin, end = (start, stop) if own else (0, 1)
        else:
            begin = tf.where(own > 0, start, 0)
            end = tf.where(own > 0, stop, 1)
        cut = [
            _rows(leaf, n, total, begin, end)
            for leaf, n in zip(leaves, rows, strict=True)
        ]
        cuts.append(tree.pack_sequence_as(batch, cut))
    return cuts, shares


def _row_count(leaf: Any) -> Any:
    """Rows of a leaf: an integer, a scalar tensor, or `None` without any."""
    shape = getattr(leaf, "shape", None)
    if shape is None or (
        shape.rank == 0 if isinstance(shape, tf.TensorShape) else not shape
    ):
        return None
    if not isinstance(shape, tf.TensorShape) or (
        shape.rank is not None and shape[0] is not None
    ):
        return int(shape[0])
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def _rows(leaf: Any, own: Any, total: Any, begin: Any, end: Any) -> Any:
    if own is None or (isinstance(own, int) and isinstance(total, int)):
        return leaf if own != total else _slice(leaf, begin, end)
    if own is not total:
        # Whether it has rows like the others is known at run time only.
        is_alike = tf.equal(own, total)
        begin = tf.where(is_alike, begin, 0)
        end = tf.where(is_alike, end, own)
    return _slice(leaf, begin, end)


def _slice(leaf: Any, begin: Any, end: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        rank = leaf.shape.rank
        first = tf.cast(tf.reshape(begin, [1]), tf.int64)
        size = tf.cast(tf.reshape(end - begin, [1]), tf.int64)
        starts = tf.concat([first, tf.zeros([rank - 1], tf.int64)], axis=0)
        sizes = tf.concat([size, leaf.dense_shape[1:]], axis=0)
        own = tf.sparse.slice(leaf, starts, sizes)
        static = tf.get_static_value(end - begin)
        own.set_shape([static, *leaf.shape.as_list()[1:]])
        return own
    return leaf[begin:end]
