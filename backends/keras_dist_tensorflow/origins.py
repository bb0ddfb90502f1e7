"""Origins of tensors: indices that were computed from rows, and others.

Optimizers treat a sparse gradient's rows one by one. Indices that were computed
from rows differ between replicas, others are the same. A graph has the
operations that made the indices; outside of graphs, `noting` sees them.
"""

import contextlib
import enum
import itertools
import warnings
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from collections.abc import Set
from typing import Any
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from keras_dist.errors import see_section
from keras_dist_tensorflow import runtime_internals

_ORIGIN = "_keras_dist_origin"
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# Operations that pass a tensor on, and the position of the input with it.
# Keras handles negative indices with `SelectV2`, of which that is the last. A
# variable's value has the variable's shape, whatever the batch.
_PASSED_ON = {
    "Cast": 0,
    "Identity": 0,
    "ReadVariableOp": 0,
    "Reshape": 0,
    "SelectV2": 2,
}


class Kind(enum.Enum):
    """Says whether a tensor was computed from rows."""

    COMMON = enum.auto()  # from none
    ROWS = enum.auto()
    UNIQUE = enum.auto()  # from rows; each number is there once
    SHAPE = enum.auto()  # the shape of a tensor from rows


class Origin(NamedTuple):
    """Knowledge of how a tensor was made."""

    kind: Kind = Kind.COMMON
    # What a vector of integers was concatenated from.
    parts: tuple[Any, ...] = ()
    # The tensor before operations that passed it on; `None` if it is this one.
    source: Any = None
    is_given: bool = False  # by `mark_rows`


def mark_rows(values: Iterable[Any]) -> None:
    """Marks tensors, or their components, as rows of a batch."""
    for value in values:
        if isinstance(value, tf.SparseTensor):
            shape = Origin(Kind.SHAPE, is_given=True)
            setattr(value.dense_shape, _ORIGIN, shape)
            mark_rows([value.indices, value.values])
        elif isinstance(value, tf.RaggedTensor):
            mark_rows([*value.nested_row_splits, value.flat_values])
        elif isinstance(value, tf.Tensor):
            setattr(value, _ORIGIN, Origin(Kind.ROWS, is_given=True))


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Sets the origins of tensors that this thread computes eagerly."""
    if not tf.executing_eagerly():
        yield
        return
    with runtime_internals.watching_operations(_note):
        yield


def note_graph(graph: Any) -> None:
    """Sets the origins of a graph's tensors, also in functions it calls."""
    for call in graph.get_operations():
        body = None
        if call.type in _CALLS:
            body = runtime_internals.body_of(call)
        if body is not None:
            _pass_on(call.inputs, body.inputs)
            note_graph(body)
            _pass_on(body.outputs, call.outputs)
        elif call.inputs:
            _note(call.type, call.inputs, None, call.outputs)


def origin_of(tensor: object) -> Origin:
    return getattr(tensor, _ORIGIN, Origin())


def _pass_on(tensors: Iterable[Any], to: Iterable[Any]) -> None:
    for tensor, other in zip(tensors, to, strict=False):
        if not origin_of(other).is_given:
            origin = origin_of(tensor)._replace(source=_source(tensor))
            setattr(other, _ORIGIN, origin._replace(is_given=False))


def _source(tensor: object) -> Any:
    source = origin_of(tensor).source
    return tensor if source is None else source


def _note(
    operation: Any,
    inputs: Any,
    attributes: Any,
    outputs: Any,
    op_name: Any = None,
    graph: Any = None,
) -> None:
    """Sets the origins of what an operation returns."""
    if graph is not None:
        return
    if isinstance(operation, bytes):
        operation = operation.decode()
    before = [origin_of(tensor) for tensor in inputs]
    passed = _PASSED_ON.get(operation)
    for place, output in enumerate(outputs):
        if origin_of(output).is_given:
            continue
        origin = Origin(_kind(operation, inputs, before, place))
        # Others would be kept alive, and may be large.
        if output.dtype.is_integer and passed is not None:
            source = _source(inputs[passed])
            origin = Origin(origin.kind, before[passed].parts, source)
        elif operation == "ConcatV2" and _is_vector(output):
            pairs = zip(inputs[:-1], before, strict=False)
            parts = [
                input_origin.parts or (tensor,)
                for tensor, input_origin in pairs
            ]
            origin = Origin(origin.kind, tuple(itertools.chain(*parts)))
        setattr(output, _ORIGIN, origin)


def _is_vector(tensor: Any) -> bool:
    return bool(tensor.dtype.is_integer and tensor.shape.rank == 1)


def _kind(
    operation: str, inputs: object, before: Sequence[Origin], place: int
) -> Kind:
    """Returns the kind of an operation's output at some place."""
    kinds = [origin.kind for origin in before]
    if kinds[:1] == [Kind.SHAPE]:
        kinds[0] = _kind_of_sizes(operation, inputs, place)
    if operation == "Rank" or set(kinds) <= {Kind.COMMON}:
        return Kind.COMMON
    if operation in ("Shape", "ShapeN"):
        return Kind.SHAPE
    passed = _PASSED_ON.get(operation)
    if passed is not None and kinds[passed] is not Kind.COMMON:
        return kinds[passed]
    is_unique = operation.startswith("Unique") and place == 0
    return Kind.UNIQUE if is_unique else Kind.ROWS


def _kind_of_sizes(operation: str, inputs: Any, place: int) -> Kind:
    """Returns whether what takes sizes of a shape may take that of axis 0."""
    if operation == "Unpack":
        return Kind.COMMON if place > 0 else Kind.ROWS
    axes = inputs[0].shape
    if operation not in ("StridedSlice", "GatherV2") or axes.rank != 1:
        return Kind.SHAPE
    begin = tf.get_static_value(inputs[1])
    step = 1
    if operation == "StridedSlice":
        step = tf.get_static_value(inputs[3])
    if begin is None or step is None or np.min(step) < 1:
        return Kind.ROWS
    if begin.min() < 0 and axes[0] is None:
        return Kind.ROWS
    # `begin_mask` needs no look: TensorFlow sets `begin` to 0 with it.
    takes_first = (begin % (axes[0] or begin.max() + 1)).min() == 0
    return Kind.ROWS if takes_first else Kind.COMMON


class StepSizes(NamedTuple):
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


def owner_of(vectors: Sequence[Any], sizes: StepSizes, name: str) -> Any:
    """Returns the `Owner` of indices, or a tensor; warns if it guesses."""
    sources = [_source(vector) for vector in vectors]
    lengths: Any = [s.shape[0] if s.shape.rank else None for s in sources]
    if (
        len(sources) != len(sizes.rows)
        or any(
            n not in rows for n, rows in zip(lengths, sizes.rows, strict=True)
        )
        or runtime_internals.is_made_outside(sources[0], sizes.start)
    ):
        return Owner.BATCH
    most = max(lengths)
    if most == 1:
        return Owner.UNKNOWN
    longest = sources[lengths.index(most)]
    known = tf.get_static_value(longest)
    is_equal = known is not None and (known == known[:1]).all()
    if is_equal and len(set(lengths)) == 1:
        _warn(name, most)
    are_equal = tf.reduce_all(longest == longest[:1])
    return tf.where(are_equal, int(Owner.ROWS), int(Owner.BATCH))


def _warn(name: str, count: int) -> None:
    warnings.warn(
        f"Variable '{name}' is looked up by {count} equal indices that are "
        "not computed from the batch, as many as each replica has rows.\n"
        "There may be one for each row, so that one device would have more "
        "of them, or the same number for any batch. They are taken as one "
        "for each row, which matters to optimizers that square gradients. If "
        "that is right, compute them from the batch: write `0 * x + 2` in "
        "place of `ops.full`. Else make them outside of the step, as a "
        "tensor in the constructor. "
        f"{see_section('The numbers differ')}",
        stacklevel=2,
    )
