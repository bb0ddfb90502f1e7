"""Training loops of the user's own in `run` train as on one device."""

import keras
import numpy as np
import pytest

import keras_dist
from conformance.contract import contract
from conformance.helpers import distribute
from conformance.helpers import gradients
from conformance.helpers import local
from conformance.helpers import replica_id
from conformance.helpers import tensor
from conformance.helpers import to_numpy
from conformance.variables import copies
from conformance.variables import shares


def _joined(values):
    return np.concatenate(local(values))


@contract(201)
def test_gradients_are_each_replicas_own(api, two):
    def step(x):
        def loss(x):
            return keras.ops.sum(keras.ops.square(x))

        return gradients(loss, [x])[1][0]

    data = distribute(api, two, [5.0, 6.0], [7.0, 8.0])
    grads = [_joined(two.run(step, (x,))).tolist() for x in data]
    assert grads == [[10.0, 12.0], [14.0, 16.0]]


@contract(202)
def test_gradients_of_a_variable_exist_on_every_replica(api, mirrored):
    n = mirrored.num_replicas_in_sync
    with mirrored.scope():
        v = keras.Variable([1.0, 2.0])

    def squared():
        return keras.ops.sum(keras.ops.square(v.value))

    def step():
        scale = float(replica_id(api) + 1)
        _, (grad,) = gradients(lambda: squared() * scale, [v])
        return grad

    grads = [x.tolist() for x in local(mirrored.run(step))]
    assert grads == [[2.0 * (r + 1), 4.0 * (r + 1)] for r in range(n)]
    assert copies(v) == [[1.0, 2.0]] * n


class Subclassed(keras.Model):
    """A model of its own class."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(3, activation="tanh")
        self.last = keras.layers.Dense(1)

    def call(self, x):
        return self.last(self.hidden(x))


class Module:
    """A plain object that keeps variables."""

    def __init__(self):
        self.kernel = keras.Variable(np.full((4, 1), 0.5, "float32"))
        self.trainable_variables = [self.kernel]

    def __call__(self, x):
        return keras.ops.matmul(x, self.kernel.value)


def _functional():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, activation="tanh")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def _recurrent():
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Reshape((2, 2)),
            keras.layers.LSTM(3),
            keras.layers.Dense(1),
        ]
    )


def _normalized():
    """With a regularizer, and statistics of the rows of all replicas."""
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="relu", kernel_regularizer="l2"),
            keras.layers.BatchNormalization(
                synchronized=keras_dist.has_strategy()
            ),
            keras.layers.Dense(1),
        ]
    )


MODELS = {
    "layer": lambda: keras.layers.Dense(1, kernel_regularizer="l1"),
    "functional": _functional,
    "subclassed": Subclassed,
    "module": Module,
    "lstm": _recurrent,
    "normalized": _normalized,
}


@contract(215)
@pytest.mark.parametrize("rows", [8, 7, 2, 1])
def test_normalization_with_the_rows_of_all_replicas(api, mirrored, rows):
    x = np.random.default_rng(1).normal(size=(rows, 3)).astype("float32")
    alone = keras.layers.BatchNormalization()
    expected = to_numpy(alone(x, training=True))
    with mirrored.scope():
        layer = keras.layers.BatchNormalization(synchronized=True)
        layer.build((None, 3))
    outputs = mirrored.run(
        lambda x: layer(x, training=True), (shares(mirrored, x),)
    )
    np.testing.assert_allclose(_joined(outputs), expected, atol=1e-5)
    for ours, theirs in zip(layer.weights, alone.weights, strict=True):
        for copy in copies(ours):
            np.testing.assert_allclose(copy, to_numpy(theirs), atol=1e-6)
    outputs = mirrored.run(layer, (shares(mirrored, x),))
    np.testing.assert_allclose(_joined(outputs), to_numpy(alone(x)), atol=1e-5)


@contract(215, native=False)
def test_normalization_with_the_replicas_own_rows(api, mirrored):
    n = mirrored.num_replicas_in_sync
    x = np.random.default_rng(1).normal(size=(2 * n, 3)).astype("float32")
    with mirrored.scope():
        layer = keras.layers.BatchNormalization(momentum=0.75)
        layer.build((None, 3))
    outputs = mirrored.run(
        lambda x: layer(x, training=True), (shares(mirrored, x),)
    )
    means, variances = [], []
    for share, output in zip(np.split(x, n), local(outputs), strict=True):
        alone = keras.layers.BatchNormalization(momentum=0.75)
        np.testing.assert_allclose(
            output, to_numpy(alone(share, training=True)), atol=1e-5
        )
        means.append(to_numpy(alone.moving_mean))
        variances.append(to_numpy(alone.moving_variance))
    for ours, theirs in (
        (layer.moving_mean, means),
        (layer.moving_variance, variances),
    ):
        for copy in copies(ours):
            np.testing.assert_allclose(copy, np.mean(theirs, axis=0), atol=1e-6)


@contract(202, native=False)
def test_a_scope_of_the_users_own_maps_some_variables(api, two):
    with two.scope():
        mapped, other = keras.Variable(1.0), keras.Variable(2.0)

    def step():
        with keras.StatelessScope(state_mapping=[(mapped, tensor(5.0))]):
            return mapped * other + replica_id(api)

    assert [x.tolist() for x in local(two.run(step))] == [10.0, 11.0]


@contract(215, native=False)
def test_dropout_differs_between_replicas(api, two):
    with two.scope():
        layer = keras.layers.Dropout(0.5, seed=3)
    ones = tensor(np.ones((1, 64)))

    def masks():
        return local(two.run(lambda: layer(ones, training=True)))

    first, second = masks()
    assert np.any(first != second)
    assert np.any(masks()[0] != first)
    state, other = copies(layer.seed_generator.state)
    assert state == other


def _train(api, strategy, model, optimizer, last):
    """A loop over batches of 8, 8 and `last` rows, twice.

    Returns:
        Tuple of the losses, the metric and the weights.
    """
    count = 16 + last
    x = np.random.default_rng(5).normal(size=(count, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        metric = keras.metrics.MeanAbsoluteError()

    def step(x, y, rows):
        def loss():
            outputs = model(x)
            error = keras.ops.sum(keras.ops.square(outputs - y))
            return error / rows + sum(getattr(model, "losses", ())) / n

        value, grads = gradients(loss, model.trainable_variables)
        optimizer.apply(grads, model.trainable_variables)
        metric.update_state(y, model(x))
        return value

    losses = []
    for start in (0, 8, 16) * 2:
        rows = slice(start, min(start + 8, count))
        args = shares(strategy, x[rows]), shares(strategy, y[rows])
        args += (rows.stop - start,)
        total = strategy.reduce("SUM", strategy.run(step, args), axis=None)
        losses.append(to_numpy(total).tolist())
    weights = [copies(w) for w in model.trainable_variables]
    for first, *others in weights:
        assert others == [first] * (len(others))
    return losses, to_numpy(metric.result()), [first for first, *_ in weights]


@contract(215, 217)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_one_device(api, mirrored, name):
    def made(strategy):
        with strategy.scope():
            keras.utils.set_random_seed(3)
            model = MODELS[name]()
            model(np.zeros((1, 4), "float32"))
            return strategy, model, keras.optimizers.Adam(0.02)

    # With 2, a replica may have no rows, which Keras' LSTM refuses on
    # TensorFlow, without a strategy too.
    refuses = name == "lstm" and keras.backend.backend() == "tensorflow"
    last = 4 if refuses else 2
    expected = _train(api, *made(api.get_strategy()), last)
    losses, metric, weights = _train(api, *made(mirrored), last)
    np.testing.assert_allclose(losses, expected[0], atol=1e-3)
    np.testing.assert_allclose(metric, expected[1], atol=1e-3)
    for ours, theirs in zip(weights, expected[2], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3)
