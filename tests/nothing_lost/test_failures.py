"""After a failure the variables have their last good values; `fit` goes on.

*Last good* is the state after a whole number of steps, the one that
`optimizer.iterations` tells: all steps before the failure, or fewer where
batches are read ahead of the step and reading failed.
"""

import keras
import numpy as np
import pytest
from keras import callbacks
from keras import layers

from parity import models
from parity.harness import BACKEND
from parity.harness import JIT
from parity.harness import assert_same
from parity.harness import central
from parity.harness import flat
from parity.harness import scope
from parity.harness import state_of
from parity.harness import strategy
from parity.harness import to_numpy

SENTINEL = 1e6


class Failure(Exception):
    """Nothing else raises it."""


def _check(x):
    """Raises while a step runs, if a row of `x` is the sentinel."""
    if BACKEND == "torch":
        if bool((x > SENTINEL / 2).any()):
            raise Failure
        return x
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.control_dependencies(
            [tf.debugging.assert_less(x, SENTINEL / 2)]
        ):
            return tf.identity(x)
    import jax

    def host(value):
        if value > SENTINEL / 2:
            raise Failure
        return np.zeros((), "float32")

    largest = jax.lax.stop_gradient(x).max()
    zero = jax.pure_callback(host, jax.ShapeDtypeStruct((), "float32"), largest)
    return x + zero


class Fragile(layers.Layer):
    """Fails in Python when `broken`; while running at the sentinel."""

    broken = False
    checks = False

    def call(self, x):
        if self.broken:
            raise Failure
        return _check(x) if self.checks else x

    def compute_output_shape(self, input_shape):
        return input_shape


def _model(num_replicas, checks=False, make=None):
    # Of a trace that fails at the second of them, Keras knows two losses.
    hidden = {"activity_regularizer": "l2", "kernel_regularizer": "l2"}
    with scope(num_replicas, make):
        model = models.sequence(
            Fragile,
            models.dense(5, activation="tanh", **hidden),
            Fragile,
            models.dense(),
        )()
        model.layers[0].checks = checks
        values = np.random.default_rng(0)
        model.set_weights(
            [values.normal(size=w.shape, scale=0.4) for w in model.weights]
        )
        model.compile("adam", "mse", metrics=["mae"], jit_compile=JIT)
        model.optimizer.build(model.trainable_variables)
    return model


def _batches():
    data = models.table(24)
    edges = (0, 7, 14, 19, 24)
    return [
        (data["x"][start:stop], data["y"][start:stop])
        for start, stop in zip(edges[:-1], edges[1:], strict=True)
    ]


def _stream(batches):
    yield from batches


def _fit(model, batches, *more):
    return model.fit(
        _stream(batches),
        steps_per_epoch=len(batches),
        shuffle=False,
        verbose=0,
        callbacks=list(more),
    ).history


_plain_states = {}


def _plain(steps):
    """Plain Keras after some steps, and after another `fit` on top."""
    if steps not in _plain_states:
        model = _model(None)
        for batch in _batches()[:steps]:
            model.train_on_batch(*batch)
        state = state_of(model)
        history = _fit(model, _batches())
        _plain_states[steps] = state, flat("history", history) | state_of(model)
    return _plain_states[steps]


def _assert_nothing_lost(model, possible_steps):
    steps = int(to_numpy(model.optimizer.iterations))
    assert steps in possible_steps
    state, later = _plain(steps)
    assert_same(state_of(model), state, rtol=1e-4)
    predictions = model.predict(models.table(5)["x"], verbose=0)
    assert np.isfinite(predictions).all()
    history = _fit(model, _batches())
    assert_same(flat("history", history) | state_of(model), later, rtol=1e-4)


def _raise(error):
    raise error


def _data_raises(error, at):
    def batches():
        yield from _batches()[:at]
        raise error

    return batches()


def _as_it_arrives(error, at):
    """What an exception in a generator is when `fit` raises it."""
    if BACKEND != "tensorflow" or at == 0:
        return error
    import tensorflow as tf

    # A tf.data pipeline reads it, on one device too, and reports it so.
    return tf.errors.UnknownError


@pytest.mark.parametrize(
    ("num_replicas", "make"), [(1, strategy), (3, strategy), (2, central)]
)
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("error", [Failure, KeyboardInterrupt])
def test_data_raises(error, at, num_replicas, make):
    model = _model(num_replicas, make=make)
    with pytest.raises(_as_it_arrives(error, at)):
        model.fit(
            _data_raises(error, at),
            steps_per_epoch=4,
            shuffle=False,
            verbose=0,
        )
    _assert_nothing_lost(model, range(at + 1))


# The batch or epoch at which the hook raises, and the steps done by then.
CALLBACKS = {
    "on_train_begin": (None, 0),
    "on_epoch_begin": (0, 0),
    "on_train_batch_begin": (2, 2),
    "on_train_batch_end": (1, 2),
    "on_epoch_end": (0, 4),
    "on_train_end": (None, 4),
}


@pytest.mark.parametrize(
    ("error", "make"),
    [(Failure, strategy), (KeyboardInterrupt, strategy), (Failure, central)],
)
@pytest.mark.parametrize("when", CALLBACKS)
def test_callback_raises(when, error, make):
    due, steps = CALLBACKS[when]
    failing = callbacks.Callback()

    def fail_when_due(index=None, logs=None):
        if due is None or index == due:
            raise error

    setattr(failing, when, fail_when_due)
    model = _model(3, make=make)
    with pytest.raises(error):
        _fit(model, _batches(), failing)
    _assert_nothing_lost(model, {steps})


def test_callback_raises_in_validation():
    failing = callbacks.LambdaCallback()
    failing.on_test_batch_end = lambda batch, logs: _raise(Failure)
    model = _model(2)
    with pytest.raises(Failure):
        model.fit(
            _stream(_batches()),
            steps_per_epoch=4,
            shuffle=False,
            validation_data=_batches()[0],
            verbose=0,
            callbacks=[failing],
        )
    _assert_nothing_lost(model, {4})


def _five_features(batch):
    return np.ones((len(batch[0]), 5), "float32"), batch[1]


def _fewer_targets(batch):
    return batch[0], batch[1][:-2]


def _strings(batch):
    return np.full(batch[0].shape, "a"), batch[1]


@pytest.mark.parametrize("spoil", [_five_features, _fewer_targets, _strings])
@pytest.mark.parametrize(
    ("at", "make"),
    [
        (0, strategy),
        pytest.param(2, strategy, marks=pytest.mark.smoke),
        (0, central),
    ],
)
def test_bad_batch(at, make, spoil):
    model = _model(3, make=make)
    batches = _batches()
    batches[at] = spoil(batches[at])
    with pytest.raises(Exception):  # noqa: B017 - each backend has its own
        _fit(model, batches)
    _assert_nothing_lost(model, range(at + 1))


@pytest.mark.parametrize("at", [0, 2])
def test_layer_raises_in_python(at):
    """While the first or a later batch's step is traced, or run."""
    if at and BACKEND == "tensorflow":
        pytest.skip("It runs Python code for the first shapes only.")
    model = _model(3)
    layer = model.layers[2]
    layer.broken = at == 0

    def break_it(batch, logs):
        layer.broken = batch == at - 1

    # Keras wraps what happens while it builds a model.
    with pytest.raises((Failure, RuntimeError)):
        _fit(
            model,
            _batches(),
            callbacks.LambdaCallback(on_train_batch_end=break_it),
        )
    layer.broken = False
    _assert_nothing_lost(model, {at})


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("at", [0, 2])
def test_layer_raises_while_running(at, num_replicas):
    model = _model(num_replicas, checks=True)
    batches = _batches()
    batches[at] = (np.full_like(batches[at][0], SENTINEL), batches[at][1])
    with pytest.raises(Exception):  # noqa: B017 - each backend has its own
        _fit(model, batches)
    _assert_nothing_lost(model, range(at + 1))


def test_other_methods_fail():
    model = _model(3)
    _fit(model, _batches()[:2])
    bad = _five_features(_batches()[1])
    calls = {
        "evaluate": ((_stream([_batches()[0], bad]),), {"steps": 2}),
        "predict": ((_stream([_batches()[0][:1], bad[:1]]),), {"steps": 2}),
        "train_on_batch": (bad, {}),
        "test_on_batch": (bad, {}),
        "predict_on_batch": (bad[:1], {}),
    }
    for name, (args, options) in calls.items():
        with pytest.raises(Exception):  # noqa: B017
            getattr(model, name)(*args, **options)
    _assert_nothing_lost(model, {2})


def test_bad_first_batch_of_an_unbuilt_model():
    """It can be built from the good batches afterwards."""

    def outcome(num_replicas, first):
        keras.utils.set_random_seed(4)
        with scope(num_replicas):
            model = keras.Sequential([layers.Dense(2), layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=JIT)
        if first:
            with pytest.raises(Failure):
                model.fit(
                    _data_raises(Failure, 0), steps_per_epoch=4, shuffle=False
                )
        _fit(model, _batches())
        return state_of(model)

    assert_same(outcome(3, True), outcome(None, False))
