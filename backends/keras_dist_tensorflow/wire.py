"""Conversions of tensors for TensorFlow's collectives, which have few dtypes.

Sums travel in one of them, gathered tensors as 32-bit words.
"""

from typing import Any

import tensorflow as tf

# Dtypes that are summed without a cast; the position is a part of the key.
SUMMED = (
    tf.float32,
    tf.float64,
    tf.float16,
    tf.bfloat16,
    tf.int32,
    tf.int64,
)


def to_words(tensor: Any) -> Any:
    """Converts a tensor of numbers or booleans to an int32 vector."""
    size = _size(tensor.dtype)
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    if size == 2:
        tensor = tf.bitcast(tensor, tf.uint16)
    words = (
        tf.cast(tensor, tf.int32) if size < 4 else tf.bitcast(tensor, tf.int32)
    )
    return tf.reshape(words, [-1])


def from_words(words: Any, like: Any) -> Any:
    """Converts the words of a tensor like another one back to a tensor."""
    dtype = like.dtype
    size = _size(dtype)
    if size > 4:
        words = tf.reshape(words, [-1, size // 4])
    if dtype == tf.bool:
        values = tf.cast(words, tf.bool)
    elif size == 2:
        values = tf.bitcast(tf.cast(words, tf.uint16), dtype)
    elif size == 1:
        values = tf.cast(words, dtype)
    else:
        values = tf.bitcast(words, dtype)
    return with_shape_of(tf.reshape(values, shape_of(like)), like)


def shape_of(tensor: Any) -> Any:
    """Returns a tensor's shape: a list of integers if known, or a tensor."""
    static = tensor.shape
    if static.is_fully_defined():
        return static.as_list()
    return tf.shape(tensor)


def size_of(tensor: Any) -> Any:
    """Returns a tensor's size: an integer if that is known, or a tensor."""
    count = tensor.shape.num_elements()
    return tf.size(tensor) if count is None else count


def _size(dtype: tf.DType) -> int:
    if dtype in (tf.string, tf.resource, tf.variant):
        raise TypeError(
            "Only numbers and booleans can be sent between workers on "
            f"TensorFlow. Received: a tensor of dtype '{dtype.name}'. Encode "
            "it as numbers, for instance with `keras.layers.StringLookup`."
        )
    return int(dtype.size)


def sendable(tensor: Any, dtype: tf.DType) -> Any:
    """Converts a tensor to `dtype`, or to one that collectives can sum."""
    if tensor.dtype.is_complex:
        half = tf.float32 if tensor.dtype == tf.complex64 else tf.float64
        return tf.bitcast(tensor, half)
    if dtype not in SUMMED:
        if not dtype.is_integer:
            raise TypeError(
                "Only numbers can be summed over workers. Received: a tensor "
                f"of dtype '{dtype.name}'."
            )
        # Overflows as its own dtype would, once `received` casts it back.
        dtype = tf.int64 if dtype.size > 2 else tf.int32
    return tf.cast(tensor, dtype)


def received(total: Any, like: Any) -> Any:
    """Undoes `sendable` on a sum: the dtype and static shape of `like`."""
    if like.dtype.is_complex:
        total = tf.bitcast(total, like.dtype)
    return with_shape_of(tf.cast(total, like.dtype), like)


def with_shape_of(tensor: Any, like: Any) -> Any:
    """Gives a tensor the static shape of another one."""
    tensor.set_shape(like.shape)
    return tensor
