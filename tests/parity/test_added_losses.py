"""What layers pass to `add_loss` counts in `fit` as it does on one device.

Of a tensor with a value for each row, Keras takes the sum. A number counts as a
mean over rows, and a sum is written as one.
"""

import functools

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

import keras_dist
from parity import models
from parity.harness import BACKEND
from parity.harness import PLAIN_ONLY
from parity.harness import assert_same
from parity.harness import compiled
from parity.harness import fitted
from parity.harness import results

# JAX runs one program on the global batch.
SEES_ALL_ROWS = BACKEND == "jax" or PLAIN_ONLY
DATA = models.table(21)


def sgd():
    return keras.optimizers.SGD(0.05)


class Adds(layers.Layer):
    """Adds what `term` computes of its input."""

    def __init__(self, term=None, **kwargs):
        super().__init__(**kwargs)
        self.term = term
        self.scale = self.add_weight(
            shape=(), initializer="ones", trainable=False, name="scale"
        )

    def call(self, x):
        self.add_loss(self.term(x))
        return x


def a_sum(x):
    """As in Keras' own guide, but for the function."""
    return 0.1 * ops.sum(keras_dist.sum_over_rows(ops.square(x)))


def a_list(x):
    """All kinds, one after the other."""
    return [
        ops.sum(keras_dist.sum_over_rows(ops.abs(x))),
        ops.mean(ops.square(x)),
        ops.square(x[:, 0]),
    ]


def a_mean_of_the_largest(x):
    """Of all rows, it knows which are above the mean of all."""
    large = ops.cast(x[:, :1] > 0.1, x.dtype)
    total = keras_dist.sum_over_rows(large * x)
    return ops.sum(total) / (ops.sum(keras_dist.sum_over_rows(large)) + 1.0)


TERMS = {
    "a_sum": a_sum,
    "a_mean": lambda x: 0.3 * ops.mean(ops.square(x)),
    # As connectionist temporal classification does in keras.io's OCR.
    "a_value_a_row": lambda x: 0.1 * ops.sum(ops.square(x), axis=-1),
    "a_table_a_row": lambda x: 0.1 * ops.square(x),
    # These have an axis, and no rows.
    "a_mean_a_column": lambda x: 0.1 * ops.mean(ops.square(x), axis=0),
    "a_sum_a_column": lambda x: 0.1 * keras_dist.sum_over_rows(ops.abs(x)),
    "a_list": a_list,
    "a_mean_of_the_largest": a_mean_of_the_largest,
}


class Weights(Adds):
    """No rows at all."""

    def call(self, x):
        square = ops.sum(ops.square(self.scale + 1.0))
        self.add_loss(0.1 * square + ops.zeros(()))
        return x


class Positive(Adds):
    """Not a number for what is below zero."""

    def call(self, x):
        x = ops.softplus(x)
        self.add_loss(-0.1 * ops.sum(ops.log(x), axis=-1))
        return x


class InTraining(Adds):
    """Another one in training than out of it."""

    def call(self, x, training=None):
        if training:
            self.add_loss(0.1 * ops.sum(ops.square(x), axis=-1))
        self.add_loss(0.2 * ops.mean(ops.abs(x)))
        return x


class InTheLayerOfAnother(Adds):
    """The outer layer adds the loss to the inner one's."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = Adds(a_sum)

    def call(self, x):
        x = self.inner(x)
        self.inner.add_loss(0.2 * ops.mean(ops.abs(x)))
        return x


class Folded(InTheLayerOfAnother):
    """Rows times columns along one axis, in a layer of its own."""

    def call(self, x):
        self.inner(ops.reshape(x, (-1, 1)))
        return x


class Twice(layers.Layer):
    """A layer that calls another one twice in a step."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = Adds(a_list)

    def call(self, x):
        return self.inner(self.inner(x) * 0.5)


CASES = {
    **{name: functools.partial(Adds, term) for name, term in TERMS.items()},
    "weights": Weights,
    "positive": Positive,
    "in_training": InTraining,
    "in_the_layer_of_another": InTheLayerOfAnother,
    "folded": Folded,
    "twice": Twice,
}


def _train(count, layer, eager=False):
    build = models.sequence(
        models.dense(5, activation="tanh"), layer, models.dense()
    )
    return results(compiled(count, build, sgd, eager=eager), DATA)


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_same_numbers(name, num_replicas):
    layer = CASES[name]
    assert_same(_train(num_replicas, layer), _train(None, layer))


@pytest.mark.parametrize("name", ["a_list", "in_training"])
def test_run_eagerly(name):
    layer = CASES[name]
    assert_same(_train(3, layer, True), _train(None, layer, True))


def test_what_couples_rows_predicts():
    """What layers add makes no difference to predictions."""

    def covariance(x):
        centered = x - ops.mean(x, axis=0, keepdims=True)
        return ops.mean(ops.square(centered))

    build = models.sequence(models.dense(3), lambda: Adds(covariance))
    x = models.table(7)["x"]
    ours, plain = (
        compiled(count, build).predict(x, batch_size=7, verbose=0)
        for count in (2, None)
    )
    np.testing.assert_allclose(ours, plain, rtol=2e-5, atol=1e-6)


class AnnealedLatent(layers.Layer):
    """A latent layer whose loss is switched off at first."""

    def __init__(self, reduce, **kwargs):
        super().__init__(**kwargs)
        self.reduce = reduce
        self.dense = layers.Dense(4)
        self.seeds = keras.random.SeedGenerator(3)

    def build(self, shape):
        self.dense.build(shape)
        self.beta = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="beta"
        )

    def call(self, x):
        mean, log_var = ops.split(self.dense(x), 2, axis=-1)
        rows = -0.5 * ops.sum(
            1.0 + log_var - ops.square(mean) - ops.exp(log_var), axis=-1
        )
        self.add_loss(self.beta * self.reduce(rows))
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return mean + 0.0 * noise

    def compute_output_shape(self, shape):
        return (*shape[:-1], 2)


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize(
    "reduce",
    [keras_dist.sum_over_rows, ops.mean, lambda rows: rows],
    ids=["sum", "mean", "row"],
)
def test_a_variational_autoencoder(reduce, num_replicas):
    def outcome(count):
        build = models.sequence(lambda: AnnealedLatent(reduce), models.dense(4))
        model = compiled(count, build, sgd)
        beta = model.layers[0].beta
        beta.assign(0.0)
        anneal = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: beta.assign(0.1 * epoch)
        )
        found = results(
            model,
            {"x": DATA["x"], "y": DATA["x"]},
            epochs=3,
            callbacks=[anneal],
        )
        return {
            name: value
            for name, value in found.items()
            if value.dtype == np.float64
        }

    assert_same(outcome(num_replicas), outcome(None))


def test_user_code_that_sums_the_losses():
    """As the docstring of `compute_loss` has it."""

    class Sums(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
            loss = ops.mean(ops.square(y_pred - y))
            return loss + ops.sum(ops.stack(self.losses))

    def build():
        adds = Adds(a_sum)
        return Sums([layers.Input((4,)), layers.Dense(3), adds])

    ours, plain = (compiled(count, build, loss=None) for count in (3, None))
    options = {"batch_size": 7, "shuffle": False, "verbose": 0}
    assert_same(
        fitted(ours, **DATA, **options), fitted(plain, **DATA, **options)
    )


@pytest.mark.skipif(SEES_ALL_ROWS, reason="On JAX it is right.")
def test_a_number_is_taken_for_a_mean_and_told_of_once():
    def term(x):
        return 0.1 * ops.sum(ops.square(x))

    def bare_sum():
        return Adds(term, name="bare_sum")

    with pytest.warns(
        keras_dist.ReplicaCodeWarning,
        match=r"(?s)Layer 'bare_sum.*adds a number.*sum_over_rows",
    ) as caught:
        actual = _train(3, bare_sum)
    assert len([w for w in caught if "a number" in str(w.message)]) == 1
    one = _train(None, bare_sum)
    assert actual["history/loss/0"] < one["history/loss/0"]


class OfAModel(keras.Model):
    """A model that adds a loss in its own call, of what it normalized."""

    def __init__(self, reduce):
        super().__init__()
        self.hidden, self.result = layers.Dense(5), layers.Dense(1)
        self.normalization = layers.BatchNormalization()
        self.reduce = reduce
        self(np.zeros((2, 4)))

    def call(self, x, training=None):
        # Replicas share attributes: they meet before one is set.
        latent = self.normalization(self.hidden(x), training=training)
        rows = ops.sum(ops.square(latent), axis=-1)
        self.add_loss(0.1 * self.reduce(rows))
        self.latent = latent
        return self.result(latent)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("reduce", [keras_dist.sum_over_rows, ops.mean])
def test_a_model_with_batch_normalization(reduce, eager):
    """Its statistics are those of all rows, in what it adds too."""
    ours, plain = (
        results(
            compiled(count, lambda: OfAModel(reduce), sgd, eager=eager), DATA
        )
        for count in (3, None)
    )
    assert_same(ours, plain)
