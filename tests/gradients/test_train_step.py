"""Steps of a model, written once with variables, train in `fit` everywhere."""

import functools

import keras
import numpy as np
import pytest

import keras_dist
from gradients.helpers import BACKEND
from gradients.helpers import array
from gradients.helpers import strategy_of
from keras_versions import several_steps

COUNTS = pytest.mark.parametrize("num_replicas", [1, 2, 4])


class Portable(keras.Model):
    """A model whose three steps are written once for all backends."""

    def train_step(self, data):
        x, y = data

        def loss_fn():
            logits = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=logits)
            return self.optimizer.scale_loss(loss), (loss, logits)

        (_, (loss, logits)), grads = keras_dist.value_and_grad(
            loss_fn, self.trainable_variables, has_aux=True
        )
        self.optimizer.apply(grads, self.trainable_variables)
        return self.logs(loss, y, logits)

    def test_step(self, data):
        x, y = data
        logits = self(x, training=False)
        loss = self.compute_loss(x=x, y=y, y_pred=logits, training=False)
        return self.logs(loss, y, logits)

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self(x, training=False) * 2.0

    def logs(self, loss, y, logits):
        for metric in self.metrics:
            if metric.name == "loss":  # of a mean over so many rows
                rows = keras.ops.shape(logits)[0]
                metric.update_state(loss, sample_weight=rows)
            else:
                metric.update_state(y, logits)
        return {metric.name: metric.result() for metric in self.metrics}


def _layers(inputs):
    # A bias before a normalization has no gradient but rounding errors.
    x = keras.layers.Dense(6, use_bias=False, kernel_regularizer="l2")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Activation("tanh")(x)
    return keras.layers.Dense(3)(x)


def _data(rows=22):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype("float32")
    return x, rng.integers(0, 3, rows).astype("int32")


def _trained(strategy, base=Portable, optimizer=None, **compiled):
    keras.utils.set_random_seed(2)
    with strategy.scope():
        inputs = keras.Input((4,))
        model = base(inputs, _layers(inputs))
        model.compile(
            optimizer or keras.optimizers.Adam(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["sparse_categorical_accuracy"],
            **compiled,
        )
    x, y = _data()
    history = model.fit(
        x,
        y,
        batch_size=8,  # and a last batch of 6
        epochs=2,
        shuffle=False,
        verbose=0,
        validation_data=(x[:5], y[:5]),
    )
    evaluated = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    predicted = model.predict(x, batch_size=8, verbose=0)
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    state = [array(v) for v in [*model.variables, *inner.variables]]
    return history.history, evaluated, predicted, state


@functools.cache
def _reference():
    """Keras' own steps, on one device."""
    logs, evaluated, predicted, state = _trained(strategy_of(1), keras.Model)
    return logs, evaluated, predicted * 2.0, state


def assert_same_training(ours, theirs, rtol=2e-4, atol=2e-5):
    for logs, expected in zip(ours[:2], theirs[:2], strict=True):
        assert logs.keys() == expected.keys()
        for key in expected:
            np.testing.assert_allclose(
                logs[key], expected[key], rtol=rtol, atol=atol, err_msg=key
            )
    np.testing.assert_allclose(ours[2], theirs[2], rtol=rtol, atol=atol)
    for own, other in zip(ours[3], theirs[3], strict=True):
        np.testing.assert_allclose(own, other, rtol=rtol, atol=atol)


@COUNTS
def test_training_is_that_of_kerass_own_steps_on_one_device(num_replicas):
    assert_same_training(_trained(strategy_of(num_replicas)), _reference())


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_steps_that_run_eagerly(num_replicas):
    ours = _trained(strategy_of(num_replicas), run_eagerly=True)
    assert_same_training(ours, _reference())


@several_steps
def test_several_steps_in_one_execution():
    ours = _trained(strategy_of(2), steps_per_execution=2)
    assert_same_training(ours, _reference())


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_loss_scaling(num_replicas):
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=8.0, dynamic_growth_steps=4
    )
    ours = _trained(strategy_of(num_replicas), optimizer=optimizer)
    assert_same_training(ours, _reference())


class Late(Portable):
    """Keeps a metric that Keras does not build by itself."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.f1 = keras.metrics.F1Score(average="macro")

    def logs(self, loss, y, logits):
        one_hot = keras.ops.one_hot(y, 3)
        self.f1.update_state(one_hot, keras.ops.softmax(logits))
        return {"f1": self.f1.result()}


def _fit_late(num_replicas, builds):
    keras.utils.set_random_seed(2)
    with strategy_of(num_replicas).scope():
        inputs = keras.Input((4,))
        model = Late(inputs, _layers(inputs))
        model.compile("sgd", "sparse_categorical_crossentropy")
        if builds:
            model.f1.update_state(np.eye(3), np.eye(3))
            model.f1.reset_state()
    x, y = _data()
    return model.fit(x, y, batch_size=8, verbose=0, shuffle=False).history


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_metrics_of_the_models_own(num_replicas):
    ours = _fit_late(num_replicas, builds=True)
    theirs = _fit_late(1, builds=True)
    np.testing.assert_allclose(ours["f1"], theirs["f1"], rtol=1e-4)


@pytest.mark.skipif(
    BACKEND != "jax", reason="Only JAX hands a step its state beforehand."
)
def test_jax_says_what_was_made_in_a_step():
    with pytest.raises(ValueError, match="Build layers, optimizers and metric"):
        _fit_late(2, builds=False)


@pytest.mark.skipif(
    BACKEND != "jax", reason="Only JAX hands a step its state beforehand."
)
def test_jax_refuses_what_it_would_lose():
    outside = keras.Variable(0.0, trainable=False, name="outside")

    class Losing(Portable):
        def train_step(self, data):
            outside.assign_add(1.0)
            return super().train_step(data)

    with pytest.raises(ValueError, match="assigned variable 'outside'"):
        _trained(strategy_of(2), Losing)
    assert float(array(outside)) == 0.0


@pytest.mark.skipif(
    BACKEND != "jax", reason="Only JAX has steps that take the state."
)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_steps_in_the_form_of_jax_stay_as_they_are(num_replicas):
    called = []

    def calling(name):
        def step(model, state, data):
            called.append(name)
            return getattr(keras.Model, name)(model, state, data)

        return step

    names = ("train_step", "test_step", "predict_step")
    own = {name: calling(name) for name in names}
    Stateless = type("Stateless", (keras.Model,), own)
    logs, evaluated, predicted, state = _trained(
        strategy_of(num_replicas), Stateless
    )
    ours = logs, evaluated, predicted * 2.0, state
    assert_same_training(ours, _reference())
    assert set(called) == set(names)
