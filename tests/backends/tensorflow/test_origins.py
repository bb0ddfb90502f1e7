"""Indices that come from a replica's rows are known by their making."""

import pytest
import tensorflow as tf

from keras_dist_tensorflow import origins
from keras_dist_tensorflow.origins import Kind
from keras_dist_tensorflow.origins import mark_rows
from keras_dist_tensorflow.origins import origin_of

WEIGHT = tf.constant([3, 1, 2])


@tf.function
def _positions(x):
    return tf.range(tf.shape(x)[1])


@tf.function
def _doubled(x):
    return x * 2


OF_ROWS = {
    "itself": lambda x: x,
    "arithmetic": lambda x: (x + 1) % 5,
    "through floats": lambda x: tf.argmax(tf.one_hot(x, 4) * 2.0, axis=-1),
    "as many": lambda x: tf.zeros_like(x),
    "broadcast": lambda x: tf.broadcast_to(tf.range(3), tf.shape(x)),
    "number of rows": lambda x: tf.range(tf.shape(x)[0]),
    "number of values": lambda x: tf.range(tf.size(x)),
    "a function's": lambda x: _doubled(x),
}
OF_ALL = {
    "constant": lambda x: tf.constant([1, 2]),
    "captured": lambda x: WEIGHT + 1,
    "positions": lambda x: tf.range(tf.shape(x)[1]),
    "from the end": lambda x: tf.range(tf.shape(x)[-1]),
    "other axes": lambda x: tf.zeros(tf.shape(x)[1:], tf.int32),
    "unstacked": lambda x: tf.range(tf.unstack(tf.shape(x))[1]),
    "rank": lambda x: tf.range(tf.rank(x)),
    "a function's": lambda x: _positions(x),
}
CASES = [(name, fn, True) for name, fn in OF_ROWS.items()]
CASES += [(name, fn, False) for name, fn in OF_ALL.items()]
EACH = pytest.mark.parametrize(
    ("fn", "expected"),
    [case[1:] for case in CASES],
    ids=[f"{name}-{expected}" for name, _, expected in CASES],
)


def depends_on_rows(tensor):
    return origin_of(tensor).kind is not Kind.COMMON


@EACH
def test_in_a_graph(fn, expected):
    found = []

    @tf.function(
        input_signature=[tf.TensorSpec([None, None], tf.int32)],
        autograph=False,
    )
    def trace(x):
        mark_rows([x])
        result = fn(x)
        origins.note_graph(result.graph)
        found.append(depends_on_rows(result))

    trace(tf.ones([2, 3], tf.int32))
    assert found == [expected]


def test_rows_that_a_function_returned_stay_rows():
    with tf.Graph().as_default() as graph:
        x = _doubled(tf.constant([1, 2]))
        mark_rows([x])
        y = x + 1
        origins.note_graph(graph)
    assert depends_on_rows(y)


@EACH
def test_outside_of_graphs(fn, expected):
    x = tf.ones([2, 3], tf.int32) + 0
    mark_rows([x])
    with origins.noting():
        result = fn(x)
    if fn is OF_ALL["a function's"]:
        expected = True  # nobody saw what is in it: taken for rows
    if fn is OF_ROWS["number of values"]:
        expected = False  # by then it is a number of Python
    assert depends_on_rows(result) is expected


def test_sparse_rows_are_marked():
    x = tf.sparse.from_dense(tf.eye(3))
    mark_rows([x])
    with origins.noting():
        assert depends_on_rows(x.values * 2)
        assert depends_on_rows(x.indices[:, 1])
        assert depends_on_rows(tf.range(x.dense_shape[0]))
        assert not depends_on_rows(tf.range(x.dense_shape[1]))


def test_ragged_rows_are_marked():
    x = tf.ragged.constant([[1, 2], [3]])
    mark_rows([x])
    with origins.noting():
        assert depends_on_rows((x + 1).flat_values)


def test_nothing_is_noted_later():
    x = tf.ones([2, 3], tf.int32) + 0
    mark_rows([x])
    with origins.noting(), origins.noting():
        pass
    assert not depends_on_rows(x + 1)
