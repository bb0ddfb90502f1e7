"""Constant indices: one for each row of the batch, or the same for any batch.

`ops.zeros((4,))` may be one index for each of the 4 rows that a replica has,
or those of 4 positions. All equal, as many as there are rows, and made in the
step itself: nothing else can be one for each row, for no row is computed from
another.
"""

import dataclasses
import enum
import warnings
from collections.abc import Sequence
from collections.abc import Set
from typing import Any

import tensorflow as tf

from keras_dist_tensorflow.operation_internals import is_eager
from keras_dist_tensorflow.operation_internals import is_made_outside
from keras_dist_tensorflow.origins import SAME
from keras_dist_tensorflow.origins import Node
from keras_dist_tensorflow.origins import through

SECTION = "The numbers differ"
_READS = ("ReadVariableOp", "Placeholder")


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """What is known of the rows of a step.

    Args:
        rows: Sequence with, for each replica, a set of the numbers of rows
            that it may have, as far as known.
        start: Integer, `tensors_so_far` when the step began.
    """

    rows: Sequence[Set[int]] = ()
    start: int = 0


class Owner(enum.IntEnum):
    """Whose indices are that no row of the batch is in.

    Of what workers say, the largest counts: it is the surest.
    """

    # As many on each replica as it has rows, which is one: can't be told.
    UNKNOWN = 0
    # All equal, and as many on each replica as it has rows.
    ROWS = 1
    # The same for any batch: one device has them once.
    BATCH = 2
    # Each replica has its own, as by its number.
    REPLICA = 3


def owner_of(nodes: Sequence[Node], sizes: StepSizes, name: str) -> Any:
    """Who owns indices that are the same on this worker's replicas.

    Args:
        nodes: Sequence of each replica's indices.
        sizes: `StepSizes`.
        name: String, the variable's, for a warning where it can't be told.

    Returns:
        An `Owner`, or an integer tensor of its value if values decide.
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


def _as_made(node: Node) -> Node:
    """Indices before they were made a vector of."""
    inner, how = through(node, ("Identity", "Cast"))
    return inner if how is None or how.kind != "Reshape" else how.inputs[0]


def _length(node: Node, start: int) -> int | None:
    """How many there are along the first axis, if the step made them."""
    source, how = through(node, SAME)
    # What is read from a variable has a shape of its own.
    is_read = how is not None and how.kind in _READS
    if node.calls or is_read or is_made_outside(source.tensor, start):
        return None
    shape = node.tensor.shape
    return shape[0] if shape.rank else None


def _value_of(tensor: Any) -> bool | None:
    """The value of a boolean that no batch decides; `None` if unknown."""
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
