"""Operations along a batch's rows have one device's gradients.

The compiler computes on shares of rows that are not equal, which JAX itself
does not allow at its own doors.
"""

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from parity.harness import assert_same

ROWS, WIDTH = 7, 4
STRATEGIES = {
    "2 replicas": lambda: keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "4 replicas": lambda: keras_dist.MirroredStrategy(
        [f"cpu:{index}" for index in range(4)]
    ),
    "central storage": lambda: keras_dist.CentralStorageStrategy(
        ["cpu:0", "cpu:1"], "cpu:3"
    ),
    "2 replicas of 2 devices": lambda: keras_dist.MirroredStrategy(
        [f"cpu:{index}" for index in range(4)], logical_devices=2
    ),
}
INDICES = np.array([6, 0, 3, 3, 5, 1, 0])
GROUPS = np.array([0, 1, 1, 2, 0, 2, 1])


def image(x):
    """Rows as the pixels of one column of an image."""
    return ops.reshape(x, (1, ROWS, WIDTH, 1))


def one_sequence(x):
    return ops.expand_dims(x, 0)


def kernel(x, *shape):
    """A kernel that depends on the batch."""
    return ops.mean(x) * ops.reshape(
        ops.arange(int(np.prod(shape)), dtype="float32"), shape
    )


def square(x):
    """A matrix with a row for each row of the batch, which can be inverted."""
    return ops.matmul(x, ops.transpose(x)) + 3 * ops.eye(ROWS)


def scanned(x):
    return ops.scan(lambda total, row: (total + row, total * row), x[0], x)[1]


def looped(x):
    return ops.fori_loop(0, 3, lambda i, total: total + x[i], x[6])


OPERATIONS = {
    "all rows minus their mean": lambda x: x - ops.mean(x, 0),
    "argsort": lambda x: ops.take_along_axis(x, ops.argsort(x, axis=0), 0),
    "associative_scan": lambda x: ops.associative_scan(ops.add, x),
    "cholesky": lambda x: ops.cholesky(square(x)),
    "concatenate": lambda x: ops.concatenate([x, x[:2]], axis=0),
    "cond": lambda x: ops.cond(
        ops.sum(x) > 0, lambda: ops.cumsum(x, axis=0), lambda: x
    ),
    "conv": lambda x: ops.conv(one_sequence(x), kernel(x, 3, WIDTH, 2)),
    "conv, strides": lambda x: ops.conv(
        one_sequence(x), kernel(x, 2, WIDTH, 2), strides=2
    ),
    "conv_transpose": lambda x: ops.conv_transpose(
        one_sequence(x), kernel(x, 3, 2, WIDTH), strides=2
    ),
    "correlate": lambda x: ops.correlate(x[:, 0], x[:3, 1], mode="same"),
    "cumprod": lambda x: ops.cumprod(x, axis=0),
    "cumsum": lambda x: ops.cumsum(x, axis=0),
    "det": lambda x: ops.det(square(x)),
    "diag": lambda x: ops.diag(x[:, 0]),
    "diff": lambda x: ops.diff(x, axis=0),
    "dot_product_attention": lambda x: ops.dot_product_attention(
        *[ops.reshape(x, (1, ROWS, 2, 2))] * 3
    ),
    "einsum": lambda x: ops.einsum("ab,cb->ac", x, x),
    "eigh": lambda x: ops.linalg.eigh(square(x))[0],
    "extract_sequences": lambda x: ops.extract_sequences(
        ops.transpose(x), 3, 2
    ),
    "fft": lambda x: ops.fft((x, x))[0],
    "flip": lambda x: ops.flip(x, axis=0) * x,
    "image.resize": lambda x: ops.image.resize(image(x), (5, 3)),
    "in_top_k": lambda x: (
        x * ops.cast(ops.in_top_k(GROUPS, x, 2), x.dtype)[:, None]
    ),
    "irfft": lambda x: ops.irfft((ops.transpose(x), ops.transpose(x)), 8),
    "kron": lambda x: ops.kron(x, x[:2]),
    "logsumexp": lambda x: ops.logsumexp(x, axis=0),
    "lstsq": lambda x: ops.lstsq(x, ops.cos(x)),
    "matmul": lambda x: ops.matmul(x, ops.transpose(x)),
    "max": lambda x: ops.max(x, axis=0),
    "median": lambda x: ops.median(x, axis=0),
    "one_hot of the largest": lambda x: ops.one_hot(ops.argmax(x, 0), ROWS) @ x,
    "pad": lambda x: ops.pad(x, ((2, 1), (0, 0)), mode="reflect"),
    "pooled, average": lambda x: ops.average_pool(one_sequence(x), 3, 2),
    "pooled, largest": lambda x: ops.max_pool(one_sequence(x), 3, 2),
    "pooled, largest of windows that overlap": lambda x: ops.max_pool(
        image(x), (3, 2), (1, 1)
    ),
    "prod": lambda x: ops.prod(x, axis=0),
    "qr": lambda x: ops.qr(x)[1],
    "quantile": lambda x: ops.quantile(x, 0.3, axis=0),
    "repeat": lambda x: ops.repeat(x, 2, axis=0),
    "reshape": lambda x: ops.reshape(x, (WIDTH, ROWS)),
    "roll": lambda x: ops.roll(x, 2, axis=0) * x,
    "rows by group": lambda x: ops.segment_sum(x, GROUPS, 3),
    "rows by group, largest": lambda x: ops.segment_max(x, GROUPS, 3),
    "scan": scanned,
    "scatter": lambda x: ops.scatter(INDICES[:, None], x, (9, WIDTH)),
    "scatter_update": lambda x: ops.scatter_update(
        x, np.array([[1], [4]]), x[:2] * x[5:]
    ),
    "slice": lambda x: ops.slice(x, (2, 1), (4, 2)),
    "slice_update": lambda x: ops.slice_update(x, (3, 0), x[:2] * 2),
    "softmax": lambda x: ops.softmax(x, axis=0),
    "solve": lambda x: ops.solve(square(x), x),
    "solve_triangular": lambda x: ops.solve_triangular(
        square(x), x, lower=True
    ),
    "sort": lambda x: ops.sort(x, axis=0),
    "split": lambda x: ops.split(x, [3], axis=0)[0],
    "sum": lambda x: ops.sum(x, axis=0),
    "svd": lambda x: ops.svd(x, full_matrices=False)[1],
    "take": lambda x: ops.take(x, INDICES, axis=0),
    "take, by the largest": lambda x: ops.take(x, ops.argmax(x, 0), axis=0),
    "tile": lambda x: ops.tile(x, (2, 1)),
    "top_k": lambda x: ops.top_k(ops.transpose(x), 3)[0],
    "tril": lambda x: ops.tril(square(x)),
    "unstack": lambda x: ops.unstack(x, axis=0)[5] * x[1],
    "unfold": lambda x: ops.image.extract_patches(image(x), (2, 2)),
    "var": lambda x: ops.var(x, axis=0),
    "vectorize_map": lambda x: ops.vectorized_map(ops.cumsum, x),
    "while_loop": looped,
}


class Operations(keras.layers.Layer):
    """Applies each operation to rows, scaled by weights of its own."""

    def build(self, shape):
        self.scale = self.add_weight(
            shape=(len(OPERATIONS), WIDTH), initializer="ones"
        )

    def compute_output_shape(self, shape):
        return shape[:1]

    def call(self, x):
        found = [
            ops.sum(ops.cos(operation(x * self.scale[index])))
            for index, operation in enumerate(OPERATIONS.values())
        ]
        return ops.sum(x, 1) + ops.sum(ops.stack(found))


def trained(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), Operations()])
        model.compile("sgd", lambda y_true, y_pred: ops.mean(y_pred))
    x = np.random.default_rng(3).normal(size=(ROWS, WIDTH)).astype("float32")
    model.fit(x, x[:, 0], batch_size=ROWS, shuffle=False, verbose=0)
    return dict(zip(OPERATIONS, model.get_weights()[0], strict=True))


@pytest.mark.parametrize(
    "kind",
    [
        *("4 replicas", "central storage"),
        pytest.param("2 replicas", marks=pytest.mark.nightly),
        pytest.param("2 replicas of 2 devices", marks=pytest.mark.nightly),
    ],
)
def test_gradients_are_those_of_one_device(kind):
    expected = trained(keras_dist.OneDeviceStrategy("cpu:0"))
    found = trained(STRATEGIES[kind]())
    assert_same(found, expected)
