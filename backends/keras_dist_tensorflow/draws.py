"""Rows of a random draw for the global batch, drawn without the others.

Philox counts: element `i` of a draw comes from the counter `i // group`. So a
replica's rows begin at a shifted counter, on CPUs and on GPUs.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist.plugins import Draw
from keras_dist.plugins import DrawnRows
from keras_dist.plugins import RowShard
from keras_dist.plugins import rows_by_size
from keras_dist_tensorflow.keras_internals import next_seed

_PHILOX = 1


def draw_rows(draw: Draw, share: RowShard) -> Any:
    """Draws a replica's rows, the numbers that one device draws for them."""
    sizes = _sizes(draw)
    given = draw.arguments
    if draw.name == "shuffle":
        given["axis"] %= len(sizes)
    if draw.name == "uniform":
        for name in ("minval", "maxval"):
            given[name] = tf.cast(given[name], _dtype(draw))
    rows = rows_by_size(sizes, share, _may_be_rows)
    if rows is None:
        return draw.again()
    if draw.shuffles(rows.axis):
        draw.warn()
        return draw.apart()
    if draw.name == "shuffle":
        return draw.again()  # one order for all rows
    if rows.axis == 0 and draw.name in _SKIPPING:
        return _SKIPPING[draw.name](draw, (sizes, rows))

    def padded(value: Any, axis: int) -> Any:
        # With ones, which are valid for each parameter.
        value = tf.convert_to_tensor(value)
        after = rows.total - rows.start - rows.size
        pads = [[0, 0]] * value.shape.rank
        pads[axis] = [rows.start, after]
        return tf.pad(value, pads, constant_values=tf.ones([], value.dtype))

    if "shape" in given:
        given["shape"] = sizes
    whole = draw.for_all(rows, draw.gathered(rows, padded))
    return draw.of(_with_static_shape(rows.cut(whole), sizes))


def _sizes(draw: Draw) -> list[Any]:
    """Returns the sizes that are drawn, integers where a graph knows them."""
    sizes = draw.shape
    if all(isinstance(size, int) for size in sizes):
        return sizes
    sizes = [x if isinstance(x, int) else tf.cast(x, tf.int32) for x in sizes]
    pairs = zip(sizes, tf.fill(sizes, 0).shape, strict=True)
    return [size if known is None else known for size, known in pairs]


def _may_be_rows(size: Any) -> bool:
    """Returns whether a graph's size may follow from the number of rows.

    It does not if it is that of an axis after the first of unknown size, such
    as that of sequences.
    """
    op = size.op
    if op.type == "Cast":
        op = op.inputs[0].op
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return True
    index = tf.get_static_value(op.inputs[1])
    sizes = op.inputs[0].op.inputs[0].shape
    if index is None or sizes.rank is None:
        return True
    return None not in list(sizes)[: int(index[0])]


def _with_static_shape(value: Any, sizes: Sequence[Any]) -> Any:
    value.set_shape([x if isinstance(x, int) else None for x in sizes])
    return value


# The sizes of a replica's part of a draw, and its rows.
_Part = tuple[list[Any], DrawnRows]


def _skipping(
    op: Any, seed: Any, part: _Part, kind: Any, **arguments: Any
) -> Any:
    """Calls an operation for a replica's rows, without those before.

    Args:
        op: A raw operation of TensorFlow that draws from a counter.
        seed: Tensor of two integers.
        part: The sizes and the `DrawnRows`, along axis 0.
        kind: `tf.DType` of what is drawn.
        **arguments: Those of the operation.
    """
    sizes, rows = part
    place = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    group = 2 if kind.size == 8 else 4
    row_size = _product(sizes[1:])
    first = tf.cast(rows.start, tf.uint64) * tf.cast(row_size, tf.uint64)
    skipped = first // group
    if op is tf.raw_ops.StatelessTruncatedNormalV2:
        skipped *= 64 * group  # it rejects numbers
    low = place.counter[0] + skipped
    carry = tf.cast(low < skipped, tf.uint64)
    counter = tf.stack([low, place.counter[1] + carry])

    drawn = functools.partial(
        op, key=place.key, counter=counter, alg=_PHILOX, **arguments
    )

    if isinstance(row_size, int) and row_size % group == 0:
        return drawn(shape=sizes)
    # The first row begins within a group.
    ahead = tf.cast(first % group, tf.int32)
    flat = drawn(shape=[ahead + tf.cast(_product(sizes), tf.int32)])
    return _with_static_shape(tf.reshape(flat[ahead:], sizes), sizes)


def _product(sizes: Sequence[Any]) -> Any:
    if all(isinstance(size, int) for size in sizes):
        return math.prod(sizes)
    return tf.reduce_prod(tf.stack(sizes))


def _float(draw: Draw, op: object, part: _Part) -> Any:
    dtype = tf.as_dtype(_dtype(draw))
    seed = next_seed(draw.arguments["seed"])
    return _skipping(op, seed, part, dtype, dtype=dtype)


def _dtype(draw: Draw) -> str:
    dtype = draw.arguments["dtype"] or keras.config.floatx()
    return str(keras.backend.standardize_dtype(dtype))


def _uniform(draw: Draw, part: _Part) -> Any:
    return draw.of(_float(draw, tf.raw_ops.StatelessRandomUniformV2, part))


def _normal(
    draw: Draw, part: _Part, op: object = tf.raw_ops.StatelessRandomNormalV2
) -> Any:
    value = _float(draw, op, part)
    mean, stddev = (
        tf.convert_to_tensor(draw.arguments[name], value.dtype)
        for name in ("mean", "stddev")
    )
    return value * stddev + mean


def _truncated(draw: Draw, part: _Part) -> Any:
    return _normal(draw, part, tf.raw_ops.StatelessTruncatedNormalV2)


def _integers(draw: Draw, part: _Part) -> Any:
    dtype = _dtype(draw)
    drawn = tf.as_dtype(dtype if dtype in ("int32", "int64") else "int64")
    low, high = (
        tf.convert_to_tensor(draw.arguments[name], drawn)
        for name in ("minval", "maxval")
    )
    seed = next_seed(draw.arguments["seed"])
    op = tf.raw_ops.StatelessRandomUniformIntV2
    value = _skipping(op, seed, part, drawn, minval=low, maxval=high)
    return tf.cast(value, dtype)


def _dropout(draw: Draw, part: _Part) -> Any:
    seed = next_seed(draw.arguments["seed"])

    def uniform(shape: object, dtype: object) -> Any:
        op = tf.raw_ops.StatelessRandomUniformV2
        return _skipping(op, seed, part, dtype, dtype=dtype)

    return tf.nn.experimental.general_dropout(
        draw.arguments["inputs"],
        rate=draw.arguments["rate"],
        uniform_sampler=uniform,
        noise_shape=part[0],
    )


_SKIPPING = {
    "dropout": _dropout,
    "normal": _normal,
    "randint": _integers,
    "truncated_normal": _truncated,
    "uniform": _uniform,
}
