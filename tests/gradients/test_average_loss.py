"""Average losses count each row of the global batch once, wherever it is."""

import contextlib

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from gradients.helpers import BACKEND
from gradients.helpers import array
from gradients.helpers import local
from gradients.helpers import strategy_of
from gradients.helpers import total

LOSSES = np.array([1.0, 2.0, 4.0, 8.0, 16.0], "float32")
WEIGHTS = np.array([1.0, 0.0, 2.0, 0.5, 1.0], "float32")
SHARES = {
    1: [[5]],
    2: [[3, 2], [5, 0], [0, 5]],
    3: [[2, 2, 1], [0, 5, 0]],
}
PLACES = [(n, sizes) for n, each in SHARES.items() for sizes in each]


def _cut(values, sizes):
    if values is None:
        return None
    parts = np.split(values, np.cumsum(sizes)[:-1])
    return keras_dist.PerReplica(parts) if len(parts) > 1 else values


@pytest.mark.parametrize(("num_replicas", "sizes"), PLACES)
@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_in_run(num_replicas, sizes, size, weights):
    strategy = strategy_of(num_replicas)

    def replica_fn(losses, weights):
        return keras_dist.compute_average_loss(losses, weights, size)

    averages = strategy.run(
        replica_fn, (_cut(LOSSES, sizes), _cut(weights, sizes))
    )
    expected = LOSSES if weights is None else LOSSES * weights
    assert total(strategy, averages) == pytest.approx(
        float(expected.sum()) / (size or 5)
    )
    for average, rows in zip(local(averages), sizes, strict=True):
        assert rows or float(average) == 0.0


@pytest.mark.parametrize("size", [None, 8, np.int64(8), "tensor"])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("in_scope", [False, True])
def test_outside_of_run(size, weights, in_scope):
    expected = LOSSES if weights is None else LOSSES * weights
    if size == "tensor":
        size = ops.convert_to_tensor(8, dtype="int32")
    with strategy_of(1).scope() if in_scope else contextlib.nullcontext():
        average = keras_dist.compute_average_loss(LOSSES, weights, size)
    mean = expected.sum() / (5 if size is None else 8)
    assert float(average) == pytest.approx(mean)


def test_replicas_without_any_row():
    strategy = strategy_of(2)
    empty = np.zeros((0,), "float32")
    averages = strategy.run(
        keras_dist.compute_average_loss,
        (keras_dist.PerReplica([empty, empty]),),
    )
    assert [float(x) for x in local(averages)] == [0.0, 0.0]


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 3, 2)])
@pytest.mark.parametrize("of", ["row", "column", "element", "none"])
def test_weights_of_rows_and_of_elements(shape, of):
    losses = np.arange(np.prod(shape), dtype="float32").reshape(shape)
    weights = {
        "row": WEIGHTS,
        "column": WEIGHTS.reshape((5,) + (1,) * max(len(shape) - 1, 1)),
        "element": np.full(shape, 0.5, "float32"),
        "none": np.float32(2.0),
    }[of]
    wide = np.asarray(weights)
    if wide.ndim > len(shape):
        wide = wide[:, 0]
    wide = wide.reshape(wide.shape + (1,) * (len(shape) - wide.ndim))
    average = keras_dist.compute_average_loss(losses, weights)
    assert float(average) == pytest.approx((losses * wide).sum() / 5)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float16", "float16"), ("bfloat16", "bfloat16"), ("int32", "float32")],
)
def test_the_dtype_is_the_losses(dtype, expected):
    losses = ops.cast(LOSSES, dtype)
    for weights in (None, WEIGHTS):
        average = keras_dist.compute_average_loss(losses, weights, 5)
        assert keras.backend.standardize_dtype(average.dtype) == expected


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((1.0,), ValueError, "at least one axis"),
        ((LOSSES, None, 0), ValueError, "must be positive"),
        ((LOSSES, None, -4), ValueError, "must be positive"),
        ((LOSSES, None, 4.0), TypeError, "must be an integer"),
        ((LOSSES, None, True), TypeError, "must be an integer"),
        ((LOSSES, None, np.array([4, 4])), ValueError, "must be a scalar"),
        ((LOSSES, np.ones((5, 2, 2))), ValueError, "must fit"),
    ],
)
def test_arguments_that_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        keras_dist.compute_average_loss(*arguments)


def test_cross_replica_context_is_refused():
    with strategy_of(2).scope():
        with pytest.raises(RuntimeError, match="`compute_average_loss`"):
            keras_dist.compute_average_loss(LOSSES)
        with pytest.raises(RuntimeError, match="`scale_regularization_loss`"):
            keras_dist.scale_regularization_loss(1.0)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_regularization_is_added_up_to_once(num_replicas):
    strategy = strategy_of(num_replicas)
    terms = [ops.convert_to_tensor([1.0, 2.0]), 3]
    losses = strategy.run(lambda: keras_dist.scale_regularization_loss(terms))
    assert total(strategy, losses) == pytest.approx(6.0)
    assert float(keras_dist.scale_regularization_loss(terms)) == 6.0
    assert float(keras_dist.scale_regularization_loss([])) == 0.0


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("rows", [8, 5, 1])
def test_in_a_step_of_fit(num_replicas, size, rows):
    """A model of one weight, whose gradient is the mean of its inputs."""

    class Model(keras.Sequential):
        def train_step(self, data):
            x = data[0]
            (kernel,) = self.trainable_variables

            def loss_fn():
                losses = self(x, training=True)[:, 0]
                loss = keras_dist.compute_average_loss(losses, None, size)
                penalty = ops.square(kernel)
                return loss + keras_dist.scale_regularization_loss(penalty)

            loss, grads = keras_dist.value_and_grad(loss_fn, [kernel])
            self.optimizer.apply(grads, [kernel])
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result()}

    strategy = strategy_of(num_replicas)
    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = Model([keras.Input((1,)), dense])
        model.tracker = keras.metrics.Mean(name="loss")
        model.compile(keras.optimizers.SGD(0.1))
        x = np.arange(1.0, rows + 1.0, dtype="float32")[:, None]
        history = model.fit(x, x, batch_size=8, shuffle=False, verbose=0)
    mean = x.sum() / (size or rows)
    assert history.history["loss"][0] == pytest.approx(mean + 1.0, rel=1e-5)
    expected = 1.0 - 0.1 * (mean + 2.0)
    assert float(array(dense.kernel)[0, 0]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.skipif(
    BACKEND != "tensorflow", reason="Only TensorFlow has `tf.function`."
)
@pytest.mark.parametrize("sizes", [[3, 2], [5, 0]])
def test_shapes_that_are_known_at_run_time_only(sizes):
    import tensorflow as tf

    strategy = strategy_of(2)

    @tf.function(
        input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None])],
    )
    def step(first, second):
        return strategy.run(
            keras_dist.compute_average_loss,
            (keras_dist.PerReplica([first, second]),),
        ).values

    parts = np.split(LOSSES, np.cumsum(sizes)[:-1])
    averages = step(*map(tf.constant, parts))
    assert sum(float(x) for x in averages) == pytest.approx(31 / 5)
