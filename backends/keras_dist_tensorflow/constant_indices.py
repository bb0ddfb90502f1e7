"""Constant indices: one for each row of the batch, or the same for any batch.

`ops.zeros((4,))` may be one index for each of the 4 rows that a replica has,
or those of 4 positions. All equal, as many as there are rows, and made in the
step itself: nothing else can be one for each row, for no row is computed from
another.
"""

import dataclasses
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


def and_not_a_row_each(
    is_common: Any, nodes: Sequence[Node], sizes: StepSizes, name: str
) -> Any:
    """Whether indices that are no rows' are the same for any batch.

    Args:
        is_common: Boolean or tensor, whether all replicas have the same.
        nodes: Sequence of each replica's indices.
        sizes: `StepSizes`.
        name: String, the variable's, for a warning where it can't be told.
    """
    inner = [_as_made(node) for node in nodes]
    lengths = [_length(node, sizes.start) for node in inner]
    if len(lengths) != len(sizes.rows) or not all(
        length in rows for length, rows in zip(lengths, sizes.rows, strict=True)
    ):
        return is_common
    first = inner[0].tensor
    are_equal: Any = tf.reduce_all(first == first[:1])
    value = _value_of(are_equal)
    if value is None:
        return tf.logical_and(is_common, ~are_equal)
    if not value:
        return is_common
    if len(set(lengths)) == 1:
        _warn(name, lengths[0])
    return False


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
