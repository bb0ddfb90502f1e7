"""Replicas in threads cost little, and torch's own code trains in them."""

import gc
import signal
import time

import keras
import numpy as np
import pytest
import torch

import keras_dist
from backends.classifier import classifier
from backends.classifier import rows
from keras_dist.plugin import threads
from parity.harness import assert_same
from parity.harness import central
from parity.harness import fitted
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import strategy as strategy_of

X, Y = rows(40)


def test_a_replica_costs_little_more_than_plain_keras(calls_a_step):
    plain = calls_a_step(classifier(), X, Y)
    calls = {}
    for num_replicas in (2, 4):
        with strategy_of(num_replicas).scope():
            model = classifier()
        calls[num_replicas] = calls_a_step(model, X, Y)
    # Replica 0 runs in this thread, with all the rendezvous it takes part in.
    assert calls[2] <= 1.35 * plain
    assert calls[4] <= 1.45 * plain


def rendezvous_of_a_step(monkeypatch, model, rows=8):
    model.train_on_batch(X[:rows], Y[:rows])
    met = []
    hold = threads.Round._hold_rendezvous

    def recording(self):
        met.append(next(iter(self._waiting.values()))[0])
        hold(self)

    with monkeypatch.context() as patch:
        patch.setattr(threads.Round, "_hold_rendezvous", recording)
        model.train_on_batch(X[:rows], Y[:rows])
    return met


@pytest.mark.parametrize("num_layers", [1, 5])
def test_one_rendezvous_for_all_gradients(monkeypatch, num_layers):
    with strategy_of(2).scope():
        model = classifier(
            *(keras.layers.Dense(4) for _ in range(num_layers)),
            optimizer=keras.optimizers.Adam(name="adam"),
            metrics=["accuracy", "sparse_categorical_crossentropy"],
        )
    met = rendezvous_of_a_step(monkeypatch, model)
    assert met == [
        "the update by optimizer 'adam'",
        "the metrics 'loss', 'compile_metrics'",
    ]


class _Interrupted(keras.optimizers.SGD):
    """Ctrl-C while the first of the variables is updated."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)


def test_an_update_is_whole_though_ctrl_c_comes():
    with strategy_of(2).scope():
        model = classifier(keras.layers.Dense(4))
        model.compile(_Interrupted(0.1), "mse")
    weights = model.get_weights()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            model.train_on_batch(X[:8], X[:8, :3])
    finally:
        signal.signal(signal.SIGINT, before)
    for old, new in zip(weights, model.get_weights(), strict=True):
        assert (old != new).any()


def test_batch_normalization_meets_twice_each_way(monkeypatch):
    with strategy_of(2).scope():
        model = classifier(
            keras.layers.Dense(4), keras.layers.BatchNormalization(name="bn")
        )
    met = rendezvous_of_a_step(monkeypatch, model)
    statistics = "the batch statistics of layer 'bn'"
    assert met.count(statistics) == 2
    assert met.count(f"the gradient of {statistics}") == 2


def test_replicas_without_rows_sit_out(monkeypatch):
    shapes = []

    def call(inputs):
        shapes.append(tuple(inputs.shape))
        return inputs

    with strategy_of(4).scope():
        model = classifier(keras.layers.Lambda(call))
    # Before the first step, Keras and the strategy may call the layer too.
    model.train_on_batch(X[:2], Y[:2])
    shapes.clear()
    model.train_on_batch(X[:2], Y[:2])
    assert shapes == [(1, 6), (1, 6)]


def uncollected_tensors(model, steps=20):
    """Tensors in reference cycles after some steps, and after collection."""

    def live():
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    for _ in range(3):
        model.train_on_batch(X[:8], Y[:8])
    gc.collect()
    before = live()
    gc.disable()
    try:
        for _ in range(steps):
            model.train_on_batch(X[:8], Y[:8])
        uncollected = live() - before
    finally:
        gc.enable()
    gc.collect()
    return uncollected, live() - before


def test_steps_leave_no_tensors_behind():
    def layers():
        return keras.layers.Dense(4), keras.layers.BatchNormalization()

    plain, _ = uncollected_tensors(classifier(*layers()), steps=20)
    with strategy_of(2).scope():
        model = classifier(*layers())
    uncollected, kept = uncollected_tensors(model, steps=20)
    assert kept <= 0
    # What is left to the collector is in cycles that Keras' own tree
    # functions make: few in Keras 3.15, one an operation in 3.14. An autograd
    # node in a cycle of ours would hold a whole graph.
    assert uncollected <= 20 * 20 + 3 * plain


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_memory_is_that_of_one_copy(live_bytes, num_replicas):
    """All virtual CPU devices are one device: they share the variables."""
    before = live_bytes()
    with strategy_of(num_replicas).scope():
        model = classifier(
            keras.layers.Dense(256), keras.layers.BatchNormalization()
        )
    seen = []

    class Spy(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(live_bytes() - before)

    model.fit(X, Y, batch_size=8, callbacks=[Spy()], verbose=0)
    variables = model.variables + model.optimizer.variables
    state = sum(v.value.untyped_storage().nbytes() for v in variables)
    # Next to the state: the data, and one step's gradients, which Keras
    # leaves on the parameters of one device.
    batch = X.nbytes + Y.nbytes
    gradients = state // 3
    assert state <= max(seen) <= state + gradients + 4 * batch


class TwoLosses(keras.Sequential):
    """As in a GAN: one loss leaves gradients on what the other trains."""

    def train_step(self, data):
        first, second = self.layers
        for layer, optimizer, loss_fn in (
            # Leaves gradients on the first layer too.
            (second, self.optimizer, keras.ops.square),
            (first, self.first_optimizer, keras.ops.abs),
        ):
            layer.zero_grad()
            loss = keras.ops.mean(loss_fn(self(data[0])))
            loss.backward()
            weights = layer.trainable_variables
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in weights], weights)
        return {"loss": loss.detach()}


class TwoUpdates(keras.Sequential):
    """The second one reads what the first has written."""

    def train_step(self, data):
        weights = self.trainable_variables
        for _ in range(2):
            self.zero_grad()
            loss = keras.ops.mean(self(data[0]) ** 2)
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in weights], weights)
        return {"loss": loss.detach()}


@pytest.mark.parametrize("make", [strategy_of, central])
@pytest.mark.parametrize("cls", [TwoLosses, TwoUpdates])
def test_several_updates_in_a_step(make, cls):
    def train(num_replicas):
        with scope(num_replicas, make):
            layers = [keras.layers.Dense(3), keras.layers.Dense(1)]
            model = cls([keras.Input((6,)), *layers])
            set_initial_weights(model).compile(keras.optimizers.SGD(0.1))
            if cls is TwoLosses:
                model.optimizer.build(layers[1].trainable_variables)
                model.first_optimizer = keras.optimizers.Adam(0.1)
        return fitted(model, X, Y, batch_size=7, shuffle=False, verbose=0)

    assert_same(train(3), train(None), 1e-4)


def test_a_branch_on_the_rows_of_a_replica_is_named():
    class Divergent(keras.Sequential):
        def train_step(self, data):
            if float(data[0][0, 0]) == 1.0:
                return {"loss": keras.ops.zeros(())}
            return super().train_step(data)

    with strategy_of(2).scope():
        model = Divergent([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.array([[0.0], [1.0]], "float32")
    with pytest.raises(
        keras_dist.ReplicaDivergenceError, match="(?s)the update by.*end of"
    ):
        model.fit(x, x, batch_size=2, shuffle=False, verbose=0)
    model.fit(np.zeros((2, 1)), x, batch_size=2, verbose=0)


def test_a_metric_that_the_model_does_not_know_is_refused():
    hidden = [keras.metrics.Mean(name="hidden")]

    class Secretive(keras.Sequential):
        def train_step(self, data):
            hidden[0].update_state(keras.ops.mean(data[0]))
            return super().train_step(data)

    with strategy_of(2).scope():
        model = Secretive([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(keras_dist.MetricMergeError, match="hidden"):
        model.fit(X, Y, batch_size=4, verbose=0)


def test_torch_modules_are_refused_by_name():
    with strategy_of(2).scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.TorchModuleWrapper(
                    torch.nn.Linear(6, 3), name="foreign"
                ),
            ]
        )
    model.compile("sgd", "mse")
    with pytest.raises(keras_dist.UnsupportedModelError, match="'foreign'"):
        model.fit(X, np.zeros((40, 3)), verbose=0)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_names_its_replica_and_ends_the_threads(failing):
    class Broken(keras.Sequential):
        def call(self, inputs, training=None):
            if inputs.device.type != "meta" and inputs[0, 0] == failing:
                raise ZeroDivisionError("in the layer")
            return super().call(inputs)

    with strategy_of(2).scope():
        model = Broken([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.array([[0.0], [1.0]], "float32")
    with pytest.raises(ZeroDivisionError) as error:
        model.fit(x, x, batch_size=2, shuffle=False, verbose=0)
    assert f"replica {failing} of 2" in "".join(error.value.__notes__)
    model.fit(x + 5, x, batch_size=2, verbose=0)
