"""Constant indices: one for each row of the batch, or the same for any batch.

`ops.zeros((4,))` may be one index for each of the 4 rows that a replica has,
or the indices of 4 positions. Only indices that are all equal, as many as the
replica has rows, and made in the step itself can be one for each row.
"""

import dataclasses
import enum
import warnings
from collections.abc import Sequence
from collections.abc import Set
from typing import Any

import tensorflow as tf

from keras_dist_tensorflow.origins import SAME
from keras_dist_tensorflow.origins import OriginNode
from keras_dist_tensorflow.origins import through
from keras_dist_tensorflow.runtime_internals import is_eager
from keras_dist_tensorflow.runtime_internals import is_made_outside

SECTION = "The numbers differ"
_READS = ("ReadVariableOp", "Placeholder")


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """Known numbers of rows of the current step.

    `rows` has, for each replica, the set of known numbers of rows that it may
    have. `start` is `tensors_so_far` when the step began.
    """

    rows: Sequence[Set[int]] = ()
    start: int = 0


class Owner(enum.IntEnum):
    """Owner of indices that are not computed from the batch.

    Of several workers' answers the largest counts, as the most certain.
    """

    # Each replica has one index and one row: `ROWS` and `BATCH` look alike.
    UNKNOWN = 0
    # One for each row: all equal, as many on each replica as it has rows.
    ROWS = 1
    # The same for any batch: one device has them once.
    BATCH = 2
    # Different on each replica, as if computed from the replica's id.
    REPLICA = 3


def owner_of(nodes: Sequence[OriginNode], sizes: StepSizes, name: str) -> Any:
    """Returns the `Owner` of indices, or an integer tensor of its value.

    `nodes` are each replica's indices, taken to be the same on all. A tensor
    is returned where only their values tell. Warns of the variable's `name`
    where the answer is a guess.
    """
    inner = [_as_made(node) for node in nodes]
    lengths = [_length(node, sizes.start) for node in inner]
    if len(lengths) != len(sizes.rows) or not all(
        length in rows for length, rows in zip(lengths, sizes.rows, strict=True)
    ):
        return Owner.BATCH
    most = max(length or 0 for length in lengths)
    if most == 1:
        return Owner.UNKNOWN
    longest = inner[lengths.index(most)].tensor
    are_equal: Any = tf.reduce_all(longest == longest[:1])
    value = _value_of(are_equal)
    if value is None:
        return tf.where(are_equal, int(Owner.ROWS), int(Owner.BATCH))
    if not value:
        return Owner.BATCH
    if len(set(lengths)) == 1:
        _warn(name, most)
    return Owner.ROWS


def _as_made(node: OriginNode) -> OriginNode:
    """Returns the indices before they were flattened to a vector."""
    inner, how = through(node, ("Identity", "Cast"))
    return inner if how is None or how.kind != "Reshape" else how.inputs[0]


def _length(node: OriginNode, start: int) -> int | None:
    """Returns the static length of indices, `None` if not made in the step."""
    source, how = through(node, SAME)
    # A variable's value has the variable's shape, whatever the batch.
    is_read = how is not None and how.kind in _READS
    if node.calls or is_read or is_made_outside(source.tensor, start):
        return None
    shape = node.tensor.shape
    return shape[0] if shape.rank else None


def _value_of(tensor: Any) -> bool | None:
    """Computes a boolean that depends on no batch; `None` if it can't.

    In a graph, a copy of the operations before it runs in a session.
    """
    if is_eager(tensor):
        return bool(tensor)
    graph = tensor.graph.as_graph_def()
    own = tf.compat.v1.graph_util.extract_sub_graph(graph, [tensor.op.name])
    for operation in own.node:
        operation.device = ""
    with tf.Graph().as_default() as alone:
        (copy,) = tf.import_graph_def(own, return_elements=[tensor.name])
        with tf.compat.v1.Session(graph=alone) as session:
            try:
                return bool(session.run(copy))
            except tf.errors.InvalidArgumentError:  # it reads a variable
                return None


def _warn(name: str, count: int | None) -> None:
    warnings.warn(
        f"Variable '{name}' is looked up by {count} equal indices that no row "
        f"of the batch is in, as many as each replica has rows: they may be "
        "one for each row, of which one device would have more, or the same "
        "for any batch. They count as one for each row, which optimizers that "
        "square gradients tell apart. If they are, compute them from the "
        "batch, as `0 * x + 2` does in place of `ops.full`; else make them "
        "outside of the step, as a tensor in the constructor. See "
        f"'{SECTION}' in tutorials/errors.md.",
        stacklevel=2,
    )
