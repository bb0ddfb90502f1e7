"""A loop that trains the wrong variables, or on one device, is told so."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from errors.helpers import CALLS
from errors.helpers import KINDS
from errors.helpers import SEVERAL
from errors.helpers import X
from errors.helpers import Y
from errors.helpers import assert_weights
from errors.helpers import make_model
from errors.helpers import mirrored
from errors.helpers import mismatch


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


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("optimizer_inside", [False, True])
def test_variables_made_outside_are_named(kind, compiled, optimizer_inside):
    strategy = KINDS[kind]()
    model = make_model()
    scope = strategy.scope() if optimizer_inside else contextlib.nullcontext()
    with scope:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    step = step_of(model, optimizer)
    if compiled:
        step = keras_dist.function(step)
    before = model.get_weights()
    (batch,) = strategy.experimental_distribute_dataset([(X, Y)])
    with mismatch(r"(?s)kernel.*outside of any scope.*distribute\(model\)"):
        strategy.run(step, batch)
    assert_weights(model, before)
    if not optimizer_inside:
        # What the message says to do.
        strategy.distribute(model)
        strategy.run(step, batch)
        assert not np.array_equal(model.get_weights()[0], before[0])


@pytest.mark.parametrize("name", CALLS)
def test_a_model_is_not_used_in_the_scope_of_another(name):
    strategy = mirrored()
    with strategy.scope():
        model = make_model(optimizer="sgd")
    before = model.get_weights()
    for devices in (["cpu:2", "cpu:3"], ["cpu:2"]):
        told = f"model '{model.name}'.*cpu:0, cpu:1.*cpu:2"
        with mirrored(*devices).scope(), mismatch(told):
            CALLS[name](model)
    assert_weights(model, before)
    CALLS[name](model)


def test_two_strategies_that_print_alike_are_told_apart():
    first, again = mirrored(), mirrored()
    told = "two objects.*made a second time.*get_strategy"
    with first.scope(), mismatch(told) as caught:
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


@pytest.mark.parametrize("kind", SEVERAL)
@pytest.mark.parametrize("inside", [False, True])
def test_a_loop_that_never_enters_run_is_told_so_once(kind, inside):
    strategy = KINDS[kind]()
    with pytest.warns(UserWarning, match="Nothing is distributed") as caught:
        step = train_natively(strategy, 4, inside)
        step(X, Y)
    messages = [str(warning.message) for warning in caught]
    (message,) = [text for text in messages if "Nothing is" in text]
    assert "kernel" in message and repr(strategy) in message


@pytest.mark.parametrize("use", ["run", "fit"])
def test_a_loop_beside_run_or_fit_is_not(use):
    strategy = mirrored()
    with strategy.scope():
        model = make_model(optimizer="adam")
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
def test_one_update_that_makes_the_slots_is_not_and_the_second_is(name):
    train_natively(mirrored(), 1, make=OPTIMIZERS[name])
    with pytest.warns(UserWarning, match="Nothing is distributed"):
        train_natively(mirrored(), 2, make=OPTIMIZERS[name])


def test_a_loop_on_one_device_is_not():
    train_natively(mirrored("cpu:0"), 3)
    with keras_dist.OneDeviceStrategy("cpu:1").scope():
        pass
    train_natively(keras_dist.OneDeviceStrategy("cpu:1"), 3)
