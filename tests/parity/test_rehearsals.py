"""A loss that a user's own step computes: one that parts is found, once."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

import keras_dist
from parity.harness import BACKEND
from parity.harness import PLAIN_ONLY
from parity.harness import assert_same
from parity.harness import central
from parity.harness import flat
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import state_of

SEES_ALL_ROWS = BACKEND == "jax" or PLAIN_ONLY
SUM, MEET = "The loss is a sum over rows", "combines different rows"


def squares(y, y_pred):
    return ops.sum(ops.square(y - y_pred), axis=-1)


def a_sum(y, y_pred):
    return ops.sum(squares(y, y_pred))


def a_sum_by_a_constant(y, y_pred):
    return ops.sum(squares(y, y_pred)) / 7


def a_sum_and_a_mean(y, y_pred):
    return ops.mean(squares(y, y_pred)) + 0.1 * ops.sum(ops.abs(y_pred))


def a_contrast(y, y_pred):
    similar = ops.matmul(y_pred, ops.transpose(y_pred))
    labels = ops.arange(ops.shape(y_pred)[0])
    return ops.mean(
        keras.losses.sparse_categorical_crossentropy(
            labels, similar, from_logits=True
        )
    )


def a_statistic(y, y_pred):
    spread = ops.sqrt(ops.var(y_pred, axis=0) + 1e-4)
    return ops.mean(squares(y, y_pred)) + ops.mean(ops.relu(1.0 - spread))


def hard_triplets(y, y_pred):
    far = ops.sum(ops.square(y_pred[:, None] - y_pred[None]), axis=-1)
    alike = ops.cast(y[:, :1] * ops.transpose(y[:, :1]) > 0, "float32")
    positive = ops.max(far * alike, axis=1)
    negative = ops.min(far + 1e3 * alike, axis=1)
    return ops.mean(ops.relu(positive - negative + 1.0))


PARTED = [
    (a_sum, SUM),
    (a_sum_by_a_constant, SUM),
    (a_sum_and_a_mean, MEET),
    (a_contrast, MEET),
    (a_statistic, MEET),
    (hard_triplets, MEET),
]


def a_mean(y, y_pred):
    return ops.mean(squares(y, y_pred))


def a_mean_by_hand(y, y_pred):
    rows = ops.cast(ops.shape(y_pred)[0], "float32")
    return ops.sum(squares(y, y_pred)) / rows


def a_divergence(y, y_pred):
    terms = 1.0 + y_pred - ops.square(y) - ops.exp(y_pred)
    return ops.mean(-0.5 * ops.sum(terms, axis=1))


def a_sum_of_keras(y, y_pred):
    return keras.losses.MeanSquaredError(reduction="sum")(y, y_pred)


def what_cancels(y, y_pred):
    return ops.mean(y_pred) - ops.mean(y_pred + 0.0 * y)


def with_a_custom_loss(y, y_pred):
    return COUPLED(y, y_pred)


class Coupled(keras.losses.Loss):
    """It gets the rows of all replicas."""

    def call(self, y, y_pred):
        return a_contrast(y, y_pred)


COUPLED = Coupled(name="coupled")


ALIKE = [
    a_mean,
    a_mean_by_hand,
    a_divergence,
    a_sum_of_keras,
    what_cancels,
    with_a_custom_loss,
]


class OwnLoss(keras.Model):
    """Overrides `compute_loss`."""

    loss_of = None

    def compute_loss(
        self,
        x=None,
        y=None,
        y_pred=None,
        sample_weight=None,
        training=True,
    ):
        return type(self).loss_of(y, y_pred) + sum(self.losses)


class OwnStep(keras.Model):
    """Overrides `train_step`."""

    loss_of = None

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables

        def loss_fn():
            return type(self).loss_of(y, self(x, training=True))

        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = loss_fn()
            slopes = tape.gradient(loss, variables)
        elif BACKEND == "torch":
            self.zero_grad()
            loss = loss_fn()
            loss.backward()
            slopes = [v.value.grad for v in variables]
        else:
            loss, slopes = keras_dist.value_and_grad(loss_fn, variables)
        self.optimizer.apply(slopes, variables)
        self.count.assign_add(1.0)
        return {"loss": loss}


class OwnDerivative(OwnStep):
    """In the words of keras_dist."""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables

        def loss_fn():
            return type(self).loss_of(y, self(x, training=True))

        loss, slopes = keras_dist.value_and_grad(loss_fn, variables)
        self.optimizer.apply(slopes, variables)
        return {"loss": loss}


def _model(base, loss, num_replicas, make=None, dropout=0.0, **options):
    keras.utils.set_random_seed(2)
    model_type = type("Own", (base,), {"loss_of": staticmethod(loss)})
    with scope(num_replicas, make):
        inputs = layers.Input((3,))
        penalty = "l2" if loss in ALIKE else None
        x = layers.Dense(5, "tanh", kernel_regularizer=penalty)(inputs)
        x = layers.BatchNormalization()(x)
        if dropout:
            x = layers.Dropout(dropout, seed=1)(x)
        model = model_type(inputs, layers.Dense(4)(x))
        model.count = keras.Variable(0.0, trainable=False, name="count")
        set_initial_weights(model)
        model.compile("sgd", "mse", jit_compile=False, **options)
    return model


def _data(rows=14):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3)).astype("float32")
    return x, rng.normal(size=(rows, 4)).astype("float32")


FIT = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}


def _train(*args, **options):
    model = _model(*args, **options)
    history = model.fit(*_data(), **FIT).history
    return flat("history", history) | state_of(model)


def _texts_of(*args, **options):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        _train(*args, **options)
    texts = [str(each.message) for each in seen]
    return [text for text in texts if "one device" in text]


BASES = [OwnLoss, OwnStep, OwnDerivative]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    ("loss", "why"), PARTED, ids=lambda each: getattr(each, "__name__", "")
)
def test_what_parts_is_warned_of_once(base, loss, why):
    texts = _texts_of(base, loss, 2)
    if SEES_ALL_ROWS:
        assert not texts
        return
    (text,) = texts
    assert why in text
    method = "compute_loss" if base is OwnLoss else "train_step"
    assert text.startswith(f"`{method}` of model")


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("loss", ALIKE)
def test_what_does_not_part_says_nothing(base, loss):
    # A warning would be an error. On JAX, plain Keras has no such step.
    alone = 1 if BACKEND == "jax" else None
    expected = _train(base, loss, alone)
    assert_same(_train(base, loss, 3), expected, rtol=1e-4)


@pytest.mark.parametrize("base", BASES)
def test_draws_say_nothing(base):
    # A warning would be an error.
    _train(base, a_mean, 3, dropout=0.5)
    if not SEES_ALL_ROWS:
        assert len(_texts_of(base, a_contrast, 3, dropout=0.5)) == 1


@pytest.mark.parametrize(
    "options", [{"run_eagerly": True}, {"make": central}], ids=str
)
def test_other_ways_to_run(options):
    if BACKEND == "jax" and "run_eagerly" in options:
        return
    count = 0 if SEES_ALL_ROWS else 1
    assert len(_texts_of(OwnStep, a_sum, 2, **options)) == count
    alone = {k: v for k, v in options.items() if k != "make"}
    assert_same(
        _train(OwnStep, a_mean, 3, **options),
        _train(OwnStep, a_mean, 1 if BACKEND == "jax" else None, **alone),
        rtol=1e-4,
    )
