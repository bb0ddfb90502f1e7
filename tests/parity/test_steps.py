"""A user's own `train_step` runs unchanged, and trains as on one device."""

import keras
import pytest
from keras import layers
from keras import ops

from keras_dist.fit.binding import Binding
from parity import models
from parity.harness import BACKEND
from parity.harness import FIT
from parity.harness import assert_same
from parity.harness import compiled
from parity.harness import flat
from parity.harness import results
from parity.harness import state_of

DATA = models.table(21)


class OwnStep(keras.Model):
    """A bare mean for a loss, trackers of one's own; no `compile` loss."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.error = keras.metrics.Mean(name="error")
        self.total = keras.metrics.Sum(name="total")

    @property
    def metrics(self):
        return [self.error, self.total]

    def loss_of(self, y, y_pred):
        return ops.mean(ops.square(y - y_pred))

    def update(self, y, y_pred):
        rows = ops.sum(ops.square(y - y_pred), axis=-1)
        self.error.update_state(rows)
        self.total.update_state(rows)
        logs = {m.name: m.result() for m in self.metrics}
        # Not a metric's: the mean of the rows at hand.
        return logs | {"of_the_batch": ops.mean(rows)}


class JaxStep(OwnStep):
    def train_step(self, state, data):
        import jax

        trainable, others, optimizer, metric_values = state
        x, y = data

        def loss_fn(trainable, others):
            y_pred, others = self.stateless_call(
                trainable, others, x, training=True
            )
            return self.loss_of(y, y_pred), (y_pred, others)

        grads, (y_pred, others) = jax.grad(loss_fn, has_aux=True)(
            trainable, others
        )
        trainable, optimizer = self.optimizer.stateless_apply(
            optimizer, grads, trainable
        )
        mapping = zip(self.metrics_variables, metric_values, strict=True)
        with keras.StatelessScope(state_mapping=list(mapping)) as values:
            logs = self.update(y, y_pred)
        metric_values = [
            values.get_current_value(v) for v in self.metrics_variables
        ]
        return logs, (trainable, others, optimizer, metric_values)


class TensorFlowStep(OwnStep):
    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_of(y, y_pred)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(grads, self.trainable_variables, strict=True)
        )
        return self.update(y, y_pred)


class TorchStep(OwnStep):
    def train_step(self, data):
        import torch

        x, y = data
        self.zero_grad()
        y_pred = self(x, training=True)
        self.loss_of(y, y_pred).backward()
        variables = list(self.trainable_weights)
        grads = [v.value.grad for v in variables]
        with torch.no_grad():
            self.optimizer.apply(grads, variables)
        return self.update(y, y_pred)


STEP = {"jax": JaxStep, "tensorflow": TensorFlowStep, "torch": TorchStep}


def _one_layer(cls):
    def build():
        x = layers.Input((4,))
        return cls(x, layers.Dense(1)(x))

    return build


@pytest.mark.parametrize(
    ("num_replicas", "eager"),
    [
        (2, False),
        pytest.param(3, False, marks=pytest.mark.smoke),
        (4, False),
        (3, True),
    ],
)
def test_own_train_step(num_replicas, eager):
    def build():
        x = layers.Input((4,))
        h = layers.Dense(5, use_bias=False)(x)
        h = layers.Activation("tanh")(layers.BatchNormalization()(h))
        return STEP[BACKEND](x, layers.Dense(1)(h))

    def outcome(count):
        model = compiled(
            count,
            build,
            lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
            eager=eager,
            loss=None,
        )
        history = model.fit(**DATA, **FIT).history
        predictions = model.predict(DATA["x"], verbose=0)
        return (
            flat("history", history)
            | flat("predict", predictions)
            | state_of(model)
        )

    assert_same(outcome(num_replicas), outcome(None))


class OwnTestAndPredict(keras.Model):
    """Steps that call the stock ones and change what they give."""

    def predict_step(self, *args):
        result = super().predict_step(*args)
        if isinstance(result, tuple):
            return result[0] * 2.0, result[1]
        return result * 2.0

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return logs | {"twice": logs["loss"] * 2.0}


def test_own_other_steps():
    ours, plain = (
        results(
            compiled(count, _one_layer(OwnTestAndPredict), metrics=["mae"]),
            DATA,
            validation_data=(*DATA.values(),),
        )
        for count in (3, None)
    )
    assert_same(ours, plain)


def _history(cls, count, rows, batch_size):
    model = compiled(count, _one_layer(cls), loss=None)
    options = FIT | {"batch_size": batch_size}
    return flat("", model.fit(**models.table(rows), **options).history)


def test_scalar_tracker():
    """`Mean.update_state(loss)`, a mean of means, on even shares."""

    class Tracked(STEP[BACKEND]):
        def update(self, y, y_pred):
            self.error.update_state(self.loss_of(y, y_pred))
            return {"error": self.error.result()}

    assert_same(_history(Tracked, 3, 12, 6), _history(Tracked, None, 12, 6))


class Distance(keras.metrics.Metric):
    """The weighted distance between two values, summed."""

    def __init__(self, name="error", **kwargs):
        super().__init__(name=name, **kwargs)
        self.sum = self.add_variable((), "zeros", name="sum")

    def add(self, y, y_pred, sample_weight=1.0):
        rows = ops.sum(ops.abs(y - 3.0 * y_pred), axis=-1)
        weight = ops.cast(sample_weight, rows.dtype)
        self.sum.assign_add(ops.sum(rows * weight))

    def result(self):
        return ops.convert_to_tensor(self.sum)


class ByNameOnly(Distance):
    def update_state(self, *values, sample_weight=1.0):
        self.add(*values, sample_weight=sample_weight)


class AnyNumber(Distance):
    def update_state(self, *values):
        self.add(*values)


class InPlaceOnly(Distance):
    def update_state(self, y, y_pred, sample_weight=1.0, /):
        self.add(y, y_pred, sample_weight)


class NotLast(Distance):
    def update_state(self, sample_weight, y, y_pred):
        self.add(y, y_pred, sample_weight)


class OwnCall(Distance):
    """Updates its state in `__call__` alone."""

    def update_state(self, y, y_pred, sample_weight):
        raise NotImplementedError

    def __call__(self, y, y_pred, sample_weight):
        self.add(y, y_pred, sample_weight)
        return self.result()


def _by_name(metric, y, y_pred):
    metric.update_state(y, y_pred, sample_weight=ops.square(y[:, 0]))


def _in_place(metric, y, y_pred):
    metric.update_state(y, y_pred, ops.square(y[:, 0]))


def _without_weight(metric, y, y_pred):
    metric.update_state(y, y_pred)


def _with_a_number_of_rows(metric, y, y_pred):
    metric.update_state(y, y_pred, ops.shape(y)[0])


def _weight_first(metric, y, y_pred):
    metric.update_state(ops.shape(y)[0], y, y_pred)


def _called(metric, y, y_pred):
    metric(y, y_pred, ops.shape(y)[0])


@pytest.mark.parametrize(
    ("metric", "use"),
    [
        (ByNameOnly, _without_weight),
        (ByNameOnly, _by_name),
        (AnyNumber, _without_weight),
        (AnyNumber, _in_place),
        (InPlaceOnly, _in_place),
        (InPlaceOnly, _with_a_number_of_rows),
        (NotLast, _weight_first),
        (OwnCall, _called),
    ],
)
def test_arguments_of_metrics(metric, use):
    """They reach the parameters that they reach on one device."""

    class Own(STEP[BACKEND]):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.error = metric()

        def update(self, y, y_pred):
            use(self.error, y, y_pred)
            return {"error": self.error.result()}

    assert_same(_history(Own, 3, 9, 7), _history(Own, None, 9, 7))


def test_a_built_model_is_prepared_once_in_train_on_batch(monkeypatch):
    model = compiled(2, models.mlp, "adam", metrics=["mae"])
    batch = models.table(4)
    model.train_on_batch(**batch)
    prepared = []
    original = Binding._prepare

    def prepare(binding, is_new):
        prepared.append((binding.model, is_new))
        original(binding, is_new)

    monkeypatch.setattr(Binding, "_prepare", prepare)
    model.train_on_batch(**batch)
    assert prepared == [(model, False)]
