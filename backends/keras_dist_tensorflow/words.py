"""Tensors of any dtype as 32-bit words, and back.

So tensors of many dtypes make one message, and TensorFlow's collectives,
which know few dtypes, send them all.
"""

from typing import Any

import tensorflow as tf


def to_words(tensor: Any) -> Any:
    """The elements of a tensor as words.

    Args:
        tensor: Tensor of numbers or booleans.

    Returns:
        Int32 tensor with one axis.

    Raises:
        TypeError: If it holds anything else, such as strings.
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
    """A tensor of what `to_words` made of one.

    Args:
        words: Int32 tensor with one axis.
        dtype: The tensor's dtype.
        shape: Its shape, a list of integers and scalar tensors, or a tensor.
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
    """A tensor's shape: of integers if that is known, else a tensor."""
    static = tensor.shape
    if static.is_fully_defined():
        return static.as_list()
    return tf.shape(tensor)


def size_of(tensor: Any) -> Any:
    """A tensor's number of elements: an integer if that is known."""
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
