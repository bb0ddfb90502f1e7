"""Conversion of tensors of any dtype to 32-bit words and back.

Tensors of many dtypes fit in one message then, and TensorFlow's collectives,
which support few dtypes, can send them.
"""

from typing import Any

import tensorflow as tf


def to_words(tensor: Any) -> Any:
    """Converts a tensor of numbers or booleans to an int32 vector.

    Raises:
        TypeError: For any other dtype, such as strings.
    """
    size = _size(tensor.dtype)
    if tensor.dtype == tf.bool:
        tensor = tf.cast(tensor, tf.uint8)
    if size == 2:
        tensor = tf.bitcast(tensor, tf.uint16)
    words = (
        tf.cast(tensor, tf.int32) if size < 4 else tf.bitcast(tensor, tf.int32)
    )
    return tf.reshape(words, [-1])


def from_words(words: Any, dtype: tf.DType, shape: Any) -> Any:
    """Converts the result of `to_words` back to a tensor.

    `shape` is a list of integers and scalar tensors, or a tensor.
    """
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
    return tf.reshape(values, shape)


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
            "Only numbers and booleans travel between workers on TensorFlow. "
            f"Received: a tensor of dtype '{dtype.name}'. Encode it as "
            "numbers, for instance with `keras.layers.StringLookup`."
        )
    return int(dtype.size)
