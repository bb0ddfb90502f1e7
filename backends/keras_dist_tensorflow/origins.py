"""Origins of tensors: indices that were computed from rows, and others.

Optimizers treat a sparse gradient's rows one by one. Indices that were computed
from rows differ between replicas, others are the same. A graph has the
operations that made the indices; outside of graphs, `noting` records them.
"""

import contextlib
import dataclasses
import enum
import warnings
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from collections.abc import Set
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from keras_dist.errors import see_section
from keras_dist_tensorflow import runtime_internals

_MARK = "_keras_dist_rows"
_MADE = "_keras_dist_made"
_ROWS = "rows"
_SHAPE = "shape"
# Operations that pass indices on, and the position of the input with them.
# Keras handles negative indices with `SelectV2`, of which that is the last.
_PASSED_ON = {"Reshape": 0, "Identity": 0, "Cast": 0, "SelectV2": 2}
SAME = tuple(_PASSED_ON)
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_READS = ("ReadVariableOp", "Placeholder")


class OriginNode(NamedTuple):
    """A tensor, and the calls of functions in whose bodies it is."""

    tensor: Any
    calls: tuple[Any, ...] = ()


class Made(NamedTuple):
    """The operation that made a tensor: its type, inputs and attributes."""

    kind: str
    inputs: list[OriginNode]
    output: int = 0
    # True if it may give another value each time, and on each replica.
    is_stateful: bool = True
    attributes: Any = None


def mark_rows(values: Iterable[Any]) -> None:
    """Marks tensors, or their components, as rows of a batch."""
    for value in values:
        if isinstance(value, tf.SparseTensor):
            setattr(value.dense_shape, _MARK, _SHAPE)
            mark_rows([value.indices, value.values])
        elif isinstance(value, tf.RaggedTensor):
            mark_rows([*value.nested_row_splits, value.flat_values])
        elif isinstance(value, tf.Tensor):
            setattr(value, _MARK, _ROWS)


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Records the origins of tensors that this thread computes eagerly."""
    if not tf.executing_eagerly():
        yield
        return
    with runtime_internals.watching_operations(_note):
        yield


def made(node: OriginNode) -> Made | None:
    """Returns the operation that made a tensor, also in called functions."""
    tensor, calls = node
    if runtime_internals.is_eager(tensor):
        kept: Made | None = getattr(tensor, _MADE, None)
        return kept
    operation = tensor.op
    if operation.type in _CALLS:
        body = runtime_internals.body_of(operation)
        if body is not None:
            inner = body.outputs[tensor.value_index]
            return Made("Identity", [OriginNode(inner, (*calls, operation))])
    if operation.type == "Placeholder" and calls:
        *outer, call = calls
        for own, given in zip(tensor.graph.inputs, call.inputs, strict=False):
            if own is tensor:
                return Made("Identity", [OriginNode(given, tuple(outer))])
    return Made(
        operation.type,
        [OriginNode(each, calls) for each in operation.inputs],
        tensor.value_index,
        operation.op_def is None or operation.op_def.is_stateful,
        operation.node_def.attr,
    )


def depends_on_rows(start: OriginNode) -> bool:
    """Returns whether a tensor was computed from marked rows."""
    seen = set()
    waiting = [start]
    while waiting:
        node = waiting.pop()
        key = (id(node.tensor), *map(id, node.calls))
        if key in seen:
            continue
        seen.add(key)
        if getattr(node.tensor, _MARK, None):
            return True
        how = made(node)
        if how is not None and how.kind != "Rank":
            skipped = 1 if _is_size_of_another_axis(how) else 0
            waiting += how.inputs[skipped:]
    return False


def are_equal(first: OriginNode, second: OriginNode) -> bool:
    """Returns whether tensors are known to be computed alike."""
    seen = set()
    waiting = [(first, second)]
    while waiting:
        one, other = waiting.pop()
        key = (id(one.tensor), id(other.tensor))
        if one.tensor is other.tensor or key in seen:
            continue
        seen.add(key)
        how, also = made(one), made(other)
        if how is None or also is None:
            return False
        if how.is_stateful or also.is_stateful:
            return False
        alike = how.kind == also.kind and how.attributes == also.attributes
        if not alike or how.output != also.output:
            return False
        if len(how.inputs) != len(also.inputs):
            return False
        waiting += zip(how.inputs, also.inputs, strict=True)
    return True


def through(
    node: OriginNode, kinds: tuple[str, ...]
) -> tuple[OriginNode, Made | None]:
    """Returns the tensor before operations of some kinds, and its maker."""
    how = made(node)
    while how is not None and how.kind in kinds:
        node = how.inputs[_PASSED_ON[how.kind]]
        how = made(node)
    return node, how


def _is_size_of_another_axis(how: Made) -> bool:
    """Returns whether an operation takes sizes of a shape, but not axis 0's."""
    if how.kind == "Unpack":
        return how.output > 0 and _is_shape(how.inputs[0])
    if how.kind not in ("StridedSlice", "GatherV2") or not _is_shape(
        how.inputs[0]
    ):
        return False
    begin = tf.get_static_value(how.inputs[1].tensor)
    axes = how.inputs[0].tensor.shape
    if begin is None or axes.rank != 1:
        return False
    if how.kind == "StridedSlice":
        step = tf.get_static_value(how.inputs[3].tensor)
        if step is None or step.min() < 1:
            return False
    if begin.min() < 0 and axes[0] is None:
        return False
    # `begin_mask` needs no look: TensorFlow sets `begin` to 0 with it.
    return bool((begin % (axes[0] or begin.max() + 1)).min() > 0)


def _is_shape(node: OriginNode) -> bool:
    node, how = through(node, ("Identity", "Cast"))
    if getattr(node.tensor, _MARK, None) == _SHAPE:
        return True
    return how is not None and how.kind in ("Shape", "ShapeN")


def _note(
    kind: Any,
    inputs: Any,
    attributes: Any,
    outputs: Any,
    op_name: Any = None,
    graph: Any = None,
) -> None:
    """Records origins: operations of integers, marks of all other tensors."""
    if graph is not None:
        return
    kind = kind.decode() if isinstance(kind, bytes) else kind
    has_rows: bool | None = None
    for place, output in enumerate(outputs):
        if output.dtype.is_integer or output.dtype.is_bool:
            nodes = [OriginNode(each) for each in inputs]
            setattr(output, _MADE, Made(kind, nodes, place))
            continue
        # Recording inputs keeps them alive, and those of other dtypes may be
        # large.
        if has_rows is None:
            has_rows = any(depends_on_rows(OriginNode(each)) for each in inputs)
        if has_rows:
            setattr(output, _MARK, _ROWS)


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """Each replica's possible numbers of rows, and `tensors_so_far` then."""

    # For each replica, the known numbers of rows that it may have.
    rows: Sequence[Set[int]] = ()
    start: int = 0


class Owner(enum.IntEnum):
    """Owner of indices not from the batch; of several, the largest counts."""

    # Each replica has one index and one row: `ROWS` and `BATCH` look alike.
    UNKNOWN = 0
    # One for each row: all equal, as many on each replica as it has rows.
    ROWS = 1
    # The same for any batch: one device has them once.
    BATCH = 2
    # Different on each replica, as if computed from the replica's id.
    REPLICA = 3


def owner_of(nodes: Sequence[OriginNode], sizes: StepSizes, name: str) -> Any:
    """Returns the `Owner` of indices, or a tensor; warns if it guesses."""
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
    is_outside = runtime_internals.is_made_outside(source.tensor, start)
    if node.calls or is_read or is_outside:
        return None
    shape = node.tensor.shape
    return shape[0] if shape.rank else None


def _value_of(tensor: Any) -> bool | None:
    """Computes a boolean that depends on no batch; `None` if it can't."""
    if runtime_internals.is_eager(tensor):
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
        f"Variable '{name}' is looked up by {count} equal indices that are "
        "not computed from the batch, as many as each replica has rows. "
        "There may be one for each row, so that one device would have more "
        "of them, or the same number for any batch. They are taken as one "
        "for each row, which matters to optimizers that square gradients. If "
        "that is right, compute them from the batch: write `0 * x + 2` in "
        "place of `ops.full`. Else make them outside of the step, as a "
        "tensor in the constructor. "
        f"{see_section('The numbers differ')}",
        stacklevel=2,
    )
