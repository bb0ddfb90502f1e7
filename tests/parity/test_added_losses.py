"""What layers pass to `add_loss`.

Of a tensor with a value for each row, Keras takes the sum. A number counts as a
mean over rows, and a sum is written as one.
"""

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

import keras_dist
from parity import models
from parity.harness import BACKEND
from parity.harness import FIT
from parity.harness import JIT
from parity.harness import PLAIN_ONLY
from parity.harness import assert_same
from parity.harness import compile_mode
from parity.harness import fitted
from parity.harness import flat
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import state_of

# JAX runs one program on the global batch.
SEES_ALL_ROWS = BACKEND == "jax" or PLAIN_ONLY


class Adds(layers.Layer):
    """Adds what `term` computes of its input."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.scale = self.add_weight(
            shape=(), initializer="ones", trainable=False, name="scale"
        )

    def call(self, x):
        self.add_loss(self.term(x))
        return x


class ASum(Adds):
    """As in Keras' own guide, but for the function."""

    def term(self, x):
        return 0.1 * ops.sum(keras_dist.sum_over_rows(ops.square(x)))


class AMean(Adds):
    def term(self, x):
        return 0.3 * ops.mean(ops.square(x))


class AValueARow(Adds):
    """As connectionist temporal classification does in keras.io's OCR."""

    def term(self, x):
        return 0.1 * ops.sum(ops.square(x), axis=-1)


class ATableARow(Adds):
    def term(self, x):
        return 0.1 * ops.square(x)


class AMeanAColumn(Adds):
    """It has an axis, and no rows."""

    def term(self, x):
        return 0.1 * ops.mean(ops.square(x), axis=0)


class ASumAColumn(Adds):
    def term(self, x):
        return 0.1 * keras_dist.sum_over_rows(ops.abs(x))


class AList(Adds):
    """Of all kinds, one after the other."""

    def term(self, x):
        return [
            ops.sum(keras_dist.sum_over_rows(ops.abs(x))),
            ops.mean(ops.square(x)),
            ops.square(x[:, 0]),
        ]


class Weights(Adds):
    """No rows at all."""

    def term(self, x):
        return 0.1 * ops.sum(ops.square(self.scale + 1.0)) + ops.zeros(())


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
        self.inner = ASum()

    def call(self, x):
        x = self.inner(x)
        self.inner.add_loss(0.2 * ops.mean(ops.abs(x)))
        return x


class Folded(Adds):
    """Rows times columns along one axis, in a layer of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = ASum()

    def call(self, x):
        self.inner(ops.reshape(x, (-1, 1)))
        return x


class AMeanOfTheLargest(Adds):
    """Of all rows, it knows which are above the mean of all."""

    def term(self, x):
        large = ops.cast(x[:, :1] > 0.1, x.dtype)
        total = keras_dist.sum_over_rows(large * x)
        return ops.sum(total) / (ops.sum(keras_dist.sum_over_rows(large)) + 1.0)


def twice(cls):
    """A layer that is called twice in a step."""

    class Twice(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = cls()

        def call(self, x):
            return self.inner(self.inner(x) * 0.5)

    return Twice


CASES = [
    ASum,
    AMean,
    AValueARow,
    ATableARow,
    AMeanAColumn,
    ASumAColumn,
    AList,
    Weights,
    Positive,
    InTraining,
    InTheLayerOfAnother,
    Folded,
    AMeanOfTheLargest,
    twice(AList),
]


def _train(count, layer, run_eagerly=False, **more):
    with scope(count):
        model = models.sequence(
            models.dense(5, activation="tanh"), layer, models.dense()
        )()
        set_initial_weights(model)
        model.compile(
            keras.optimizers.SGD(0.05), "mse", **compile_mode(run_eagerly)
        )
    data = models.table(21)
    history = model.fit(**data, **FIT, **more).history
    logs = model.evaluate(**data, batch_size=7, verbose=0, return_dict=True)
    return flat("history", history) | flat("evaluate", logs) | state_of(model)


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("layer", CASES, ids=lambda cls: cls.__name__)
def test_same_numbers(layer, num_replicas):
    assert_same(_train(num_replicas, layer), _train(None, layer))


@pytest.mark.parametrize("layer", [AList, InTraining])
def test_run_eagerly(layer):
    options = {"run_eagerly": True}
    assert_same(_train(3, layer, **options), _train(None, layer, **options))


@pytest.mark.parametrize("name", ["l1", "l2"])
def test_activity_regularizers(name):
    def dense():
        return layers.Dense(4, activity_regularizer=name)

    assert_same(_train(3, dense), _train(None, dense))


class Covariance(Adds):
    def term(self, x):
        centered = x - ops.mean(x, axis=0, keepdims=True)
        return ops.mean(ops.square(centered))


def test_what_couples_rows_predicts():
    """What layers add makes no difference to predictions."""

    def outcome(count):
        with scope(count):
            model = models.sequence(models.dense(3), Covariance)()
            set_initial_weights(model)
        x = models.table(7)["x"]
        return flat("predict", model.predict(x, batch_size=7, verbose=0))

    assert_same(outcome(2), outcome(None))


class AnnealedLatent(layers.Layer):
    """A latent layer whose loss is switched off at first."""

    def __init__(self, reduce, **kwargs):
        super().__init__(**kwargs)
        self.reduce = reduce
        self.mean, self.log_var = layers.Dense(2), layers.Dense(2)
        self.seeds = keras.random.SeedGenerator(3)

    def build(self, shape):
        self.mean.build(shape)
        self.log_var.build(shape)
        self.beta = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="beta"
        )

    def call(self, x):
        mean, log_var = self.mean(x), self.log_var(x)
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
    class Anneal(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            (latent,) = (
                layer
                for layer in self.model.layers
                if isinstance(layer, AnnealedLatent)
            )
            latent.beta.assign(0.1 * epoch)

    def outcome(count):
        with scope(count):
            x = layers.Input((4,))
            latent = AnnealedLatent(reduce)
            model = keras.Model(x, layers.Dense(4)(latent(x)))
            set_initial_weights(model)
            latent.beta.assign(0.0)
            model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=JIT)
        x = models.table(21)["x"]
        options = FIT | {"epochs": 3, "callbacks": [Anneal()]}
        history = model.fit(x, x, **options).history
        return flat("history", history) | {
            name: value
            for name, value in state_of(model).items()
            if value.dtype == np.float64
        }

    assert_same(outcome(num_replicas), outcome(None))


def test_user_code_that_sums_the_losses():
    """As the docstring of `compute_loss` has it."""

    class Sums(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
            loss = ops.mean(ops.square(y_pred - y))
            return loss + ops.sum(ops.stack(self.losses))

    def outcome(count):
        with scope(count):
            x = layers.Input((4,))
            model = Sums(x, layers.Dense(1)(ASum()(layers.Dense(3)(x))))
            set_initial_weights(model).compile("sgd", jit_compile=JIT)
        model.fit(**models.table(21), **FIT)
        return state_of(model)

    assert_same(outcome(3), outcome(None))


class BareSum(Adds):
    def term(self, x):
        return 0.1 * ops.sum(ops.square(x))


@pytest.mark.skipif(SEES_ALL_ROWS, reason="On JAX it is right.")
def test_a_number_is_taken_for_a_mean_and_told_of_once():
    with pytest.warns(
        keras_dist.ReplicaCodeWarning,
        match=r"Layer 'bare_sum.*adds a number.*sum_over_rows",
    ) as caught:
        actual = _train(3, BareSum)
    assert len([w for w in caught if "a number" in str(w.message)]) == 1
    one = _train(None, BareSum)
    assert actual["history/loss/0"] < one["history/loss/0"]


class OfAModel(keras.Model):
    """A model that adds a loss in its own call, of what it normalized."""

    def __init__(self, reduce):
        super().__init__()
        self.hidden, self.result = layers.Dense(5), layers.Dense(1)
        self.normalization = layers.BatchNormalization()
        self.reduce = reduce

    def call(self, x, training=None):
        # Replicas share attributes: they meet before one is set.
        latent = self.normalization(self.hidden(x), training=training)
        rows = ops.sum(ops.square(latent), axis=-1)
        self.add_loss(0.1 * self.reduce(rows))
        self.latent = latent
        return self.result(latent)


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("reduce", [keras_dist.sum_over_rows, ops.mean])
def test_a_model_with_batch_normalization(reduce, run_eagerly):
    """Its statistics are those of all rows, in what it adds too."""

    def outcome(count):
        with scope(count):
            model = OfAModel(reduce)
            model(np.zeros((2, 4)))
            set_initial_weights(model).compile(
                keras.optimizers.SGD(0.05), "mse", **compile_mode(run_eagerly)
            )
        return fitted(model, **models.table(21), **FIT)

    assert_same(outcome(3), outcome(None))
