"""Loops of a user's own that train the wrong variables, or on one device."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist

X = np.ones((4, 3), "float32")
Y = np.zeros((4, 1), "float32")
KINDS = ["MirroredStrategy", "CentralStorageStrategy"]


def make_strategy(kind="MirroredStrategy", devices=("cpu:0", "cpu:1")):
    return getattr(keras_dist, kind)(list(devices))


def make_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def step_of(model, optimizer):
    def step(x, y):
        def loss():
            # Not an array of NumPy's, which PyTorch refuses.
            target = ops.convert_to_tensor(y)
            return ops.mean(ops.square(model(x) - target))

        value, gradients = keras_dist.value_and_grad(
            loss, model.trainable_variables
        )
        optimizer.apply(gradients, model.trainable_variables)
        return value

    return step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("optimizer_inside", [False, True])
def test_variables_made_outside_are_named(kind, compiled, optimizer_inside):
    strategy = make_strategy(kind)
    model = make_model()
    scope = strategy.scope() if optimizer_inside else contextlib.nullcontext()
    with scope:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    step = step_of(model, optimizer)
    if compiled:
        step = keras_dist.function(step)
    before = model.get_weights()
    (batch,) = strategy.experimental_distribute_dataset([(X, Y)])
    with pytest.raises(
        keras_dist.StrategyMismatchError,
        match=r"(?s)kernel.*outside of any scope.*distribute\(model\)",
    ):
        strategy.run(step, batch)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_a_model_that_is_adopted_is_trained():
    strategy = make_strategy()
    model = strategy.distribute(make_model())
    step = step_of(model, keras.optimizers.SGD(0.1))
    before = model.get_weights()[0]
    (batch,) = strategy.experimental_distribute_dataset([(X, Y)])
    strategy.run(step, batch)
    assert not np.array_equal(model.get_weights()[0], before)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.fit(X, Y, verbose=0),
        lambda model: model.evaluate(X, Y, verbose=0),
        lambda model: model.predict(X, verbose=0),
        lambda model: model.train_on_batch(X, Y),
    ],
    ids=["fit", "evaluate", "predict", "train_on_batch"],
)
@pytest.mark.parametrize("devices", [["cpu:2", "cpu:3"], ["cpu:2"]])
def test_a_model_is_not_used_in_the_scope_of_another(call, devices):
    strategy = make_strategy()
    with strategy.scope():
        model = make_model()
        model.compile("sgd", "mse")
    before = model.get_weights()
    with (
        make_strategy(devices=devices).scope(),
        pytest.raises(
            keras_dist.StrategyMismatchError,
            match=f"model '{model.name}'.*cpu:0, cpu:1.*cpu:2",
        ),
    ):
        call(model)
    for now, then in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)
    call(model)


def test_two_strategies_that_print_alike_are_told_apart():
    first, again = make_strategy(), make_strategy()
    with (
        first.scope(),
        pytest.raises(
            keras_dist.StrategyMismatchError,
            match="two objects.*made a second time.*get_strategy",
        ) as caught,
    ):
        again.scope().__enter__()
    assert hex(id(first)) in str(caught.value)
    assert hex(id(again)) in str(caught.value)


class OwnApply(keras.optimizers.Adam):
    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)


OPTIMIZERS = {
    "Keras' own": lambda: keras.optimizers.Adam(0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(OwnApply(0.1)),
    "overridden": lambda: OwnApply(0.1),
}


def train_natively(strategy, steps, inside=True, make=OPTIMIZERS["Keras' own"]):
    with strategy.scope():
        model = make_model()
        optimizer = make()
    step = step_of(model, optimizer)
    scope = strategy.scope() if inside else contextlib.nullcontext()
    with scope:
        for _ in range(steps):
            step(X, Y)
    return step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inside", [False, True])
def test_a_loop_that_never_enters_run_is_told_so_once(kind, inside):
    strategy = make_strategy(kind)
    with pytest.warns(UserWarning, match="Nothing is distributed") as caught:
        step = train_natively(strategy, 4, inside)
        step(X, Y)
    messages = [str(warning.message) for warning in caught]
    (message,) = [text for text in messages if "Nothing is" in text]
    assert "kernel" in message and repr(strategy) in message


@pytest.mark.parametrize("use", ["run", "fit"])
def test_a_loop_beside_run_or_fit_is_not(use):
    strategy = make_strategy()
    with strategy.scope():
        model = make_model()
        model.compile("adam", "mse")
    step = step_of(model, model.optimizer)
    if use == "run":
        (batch,) = strategy.experimental_distribute_dataset([(X, Y)])
        strategy.run(step, batch)
    else:
        model.fit(X, Y, epochs=3, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(X, Y)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_update_that_makes_the_slots_is_not(name):
    train_natively(make_strategy(), 1, make=OPTIMIZERS[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_second_update_is(name):
    with pytest.warns(UserWarning, match="Nothing is distributed"):
        train_natively(make_strategy(), 2, make=OPTIMIZERS[name])


def test_a_loop_on_one_device_is_not():
    train_natively(make_strategy(devices=["cpu:0"]), 3)
    with keras_dist.OneDeviceStrategy("cpu:1").scope():
        pass
    train_natively(keras_dist.OneDeviceStrategy("cpu:1"), 3)
