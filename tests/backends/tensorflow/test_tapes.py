"""A user's `train_step` may take gradients of targets with a value a row.

TensorFlow sums them. So do we, over the global batch.
"""

import keras
import pytest
import tensorflow as tf
from keras import layers
from keras import ops

import keras_dist
from parity import models
from parity.harness import assert_same
from parity.harness import flat
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import state_of

FIT = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}


class Steps(keras.Model):
    """Takes one kind of gradient; `gradients` says which."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            y_pred = self(x, training=True)
            rows = keras.losses.mean_squared_error(y, y_pred)
            grads = self.gradients(tape, x, rows, y_pred)
        self.optimizer.apply_gradients(
            zip(grads, self.trainable_weights, strict=True)
        )
        return {"loss": ops.mean(rows)}


class AValueARow(Steps):
    """As keras.io's diffusion model and SimCLR do."""

    def gradients(self, tape, x, rows, y_pred):
        return tape.gradient(rows, self.trainable_weights)


class ATableARow(Steps):
    def gradients(self, tape, x, rows, y_pred):
        return tape.gradient(ops.square(y_pred), self.trainable_weights)


class SeveralValuesARow(Steps):
    """Two views of each row, one after the other."""

    def gradients(self, tape, x, rows, y_pred):
        both = ops.concatenate([rows, 2.0 * rows], axis=0)
        return tape.gradient(both, self.trainable_weights)


class Weighted(Steps):
    def gradients(self, tape, x, rows, y_pred):
        return tape.gradient(
            rows, self.trainable_weights, output_gradients=ops.square(rows)
        )


class AMeanBesides(Steps):
    """A list of a target with rows and one without."""

    def gradients(self, tape, x, rows, y_pred):
        mean = ops.mean(ops.square(y_pred))
        targets = {"mean": mean, "rows": rows}
        return tape.gradient(targets, self.trainable_weights)


class AStackOfMeans(Steps):
    """It has an axis, and no rows."""

    def gradients(self, tape, x, rows, y_pred):
        means = tf.stack([ops.mean(rows), ops.mean(ops.abs(y_pred))])
        return tape.gradient(means, self.trainable_weights)


class AMean(Steps):
    def gradients(self, tape, x, rows, y_pred):
        return tape.gradient(ops.mean(rows), self.trainable_weights)


class OfALossWithoutReduction(Steps):
    """Keras' own, whose rows are averaged after that."""

    def gradients(self, tape, x, rows, y_pred):
        loss = keras.losses.MeanSquaredError(reduction=None)
        mean = ops.mean(3.0 * loss(ops.zeros_like(y_pred), y_pred))
        return tape.gradient(mean, self.trainable_weights)


class SummedWithoutReduction(Steps):
    def gradients(self, tape, x, rows, y_pred):
        loss = keras.losses.MeanSquaredError(reduction=None)
        values = loss(ops.zeros_like(y_pred), y_pred)
        return tape.gradient(values, self.trainable_weights)


class Penalty(Steps):
    """The gradients of rows by their inputs belong to the rows."""

    def gradients(self, tape, x, rows, y_pred):
        with tf.GradientTape() as inner:
            inner.watch(x)
            scores = self(x, training=True)
        slopes = inner.gradient(scores, x)
        norms = ops.sqrt(ops.sum(ops.square(slopes), axis=1) + 1e-6)
        loss = ops.mean(rows) + ops.mean(ops.square(norms - 1.0))
        return tape.gradient(loss, self.trainable_weights)


CASES = Steps.__subclasses__()


def _outcome(count, cls, eager, data=None):
    with scope(count):
        x = layers.Input((4,))
        h = layers.Dense(5, activation="tanh")(x)
        model = set_initial_weights(cls(x, layers.Dense(1)(h)))
        model.compile("sgd", run_eagerly=eager)
    data = models.table(21) if data is None else data
    history = model.fit(**data, **FIT).history
    return flat("history", history) | state_of(model)


@pytest.mark.parametrize(
    ("num_replicas", "eager"), [(2, False), (3, False), (3, True)]
)
@pytest.mark.parametrize("cls", CASES)
def test_same_numbers(cls, num_replicas, eager):
    assert_same(_outcome(num_replicas, cls, eager), _outcome(None, cls, eager))


@pytest.mark.parametrize("cls", [AValueARow, AMeanBesides, AStackOfMeans])
def test_batches_of_a_size_that_the_trace_does_not_know(cls):
    def outcome(count):
        data = models.table(19)
        rows = tf.data.Dataset.from_tensor_slices((data["x"], data["y"]))
        with scope(count):
            x = layers.Input((4,))
            model = set_initial_weights(cls(x, layers.Dense(1)(x)))
            model.compile("sgd")
        model.fit(rows.batch(7), epochs=2, shuffle=False, verbose=0)
        return state_of(model)

    assert_same(outcome(3), outcome(None))


class MixedSources(Steps):
    def gradients(self, tape, x, rows, y_pred):
        with tf.GradientTape() as inner:
            inner.watch(x)
            values = self(x, training=True)
            targets = [ops.mean(values), values]
        return inner.gradient(targets, [x, *self.trainable_weights])[1:]


def test_what_one_call_can_not_tell_apart():
    with pytest.raises(
        keras_dist.UnsupportedModelError, match=r"once for each kind"
    ):
        _outcome(2, MixedSources, eager=False)


def test_in_a_replica_function_gradients_are_plain_sums():
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        v = keras.Variable(2.0)

    def replica_fn():
        with tf.GradientTape() as tape:
            rows = v * tf.constant([1.0, 2.0, 3.0])
        return tape.gradient(rows, [v])[0]

    values = strategy.experimental_local_results(strategy.run(replica_fn))
    assert [float(value) for value in values] == [6.0, 6.0]
