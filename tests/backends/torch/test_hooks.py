"""Hooks on tensors see what they see on one device, or are refused."""

import keras
import numpy as np
import pytest
import torch

import keras_dist
from keras_dist.errors import UnsupportedModelError
from parity.harness import central
from parity.harness import strategy

X = np.random.default_rng(0).normal(size=(15, 4)).astype("float32")
Y = X.sum(1, keepdims=True) * 5


def clipped(gradient):
    return gradient.clamp(-0.05, 0.05)


def clip(parameter):
    parameter.grad.clamp_(-0.05, 0.05)


class Clipped(keras.layers.Layer):
    """Clips the gradient of what goes through it."""

    seen = ()

    def call(self, x):
        if x.requires_grad:
            x.register_hook(clipped)
            x.register_hook(lambda gradient: type(self).seen.append(gradient))
        return x


class Hooked(keras.Model):
    """Gives a variable a hook in its own step."""

    def train_step(self, data):
        self.trainable_variables[0].value.register_hook(clipped)
        return super().train_step(data)


def trained(its, layer=keras.layers.Identity, hooks=(), kind=keras.Model):
    keras.utils.set_random_seed(0)
    with its.scope():
        inputs = keras.Input((4,))
        outputs = keras.layers.Dense(8, activation="tanh")(inputs)
        model = kind(inputs, keras.layers.Dense(1)(layer()(outputs)))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    for name, hook in hooks:
        for parameter in model.parameters():
            getattr(parameter, name)(hook)
    model.fit(X, Y, batch_size=15, epochs=3, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_on_what_layers_compute(count, monkeypatch):
    monkeypatch.setattr(Clipped, "seen", [])
    ours = trained(strategy(count), Clipped)
    assert len(Clipped.seen) == 3 * count  # a step, a replica
    one = keras_dist.OneDeviceStrategy("cpu:0")
    plain = trained(one, Clipped)
    for weight, expected in zip(ours, plain, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-6)
    # Else nothing was clipped.
    assert not np.allclose(plain[0], trained(one)[0], atol=1e-3)


HOOKS = {
    "register_hook": clipped,
    "register_post_accumulate_grad_hook": clip,
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("make", [strategy, central])
def test_on_variables(name, make):
    with pytest.raises(
        keras_dist.UnsupportedModelError,
        match=rf"(?s){name}.*kernel.*clipvalue",
    ):
        trained(make(2), hooks=[(name, HOOKS[name])])


@pytest.mark.parametrize("name", HOOKS)
def test_on_variables_of_one_device(name):
    one = keras_dist.OneDeviceStrategy("cpu:0")
    hooks = [(name, HOOKS[name])]
    found, expected = (
        trained(each, hooks=hooks)[0] for each in (one, strategy(1))
    )
    np.testing.assert_array_equal(found, expected)
    assert not np.allclose(found, trained(one)[0], atol=1e-3)


def test_on_a_variable_in_a_step():
    with pytest.raises(keras_dist.UnsupportedModelError, match="clipvalue"):
        trained(strategy(4), kind=Hooked)


def test_on_variables_in_run():
    two = strategy(2)
    with two.scope():
        variable = keras.Variable([1.0, 2.0])
    variable.value.register_hook(clipped)
    with pytest.raises(keras_dist.UnsupportedModelError, match="clipvalue"):
        two.run(lambda: variable.value.sum())


def test_elsewhere_they_are_torchs():
    strategy(2)
    seen = []
    tensor = torch.ones(2).requires_grad_()
    handle = (2 * tensor).register_hook(seen.append)
    (tensor * 3).sum().backward()
    assert hasattr(handle, "remove") and not seen
    tensor.register_hook(seen.append)
    (tensor * 3).sum().backward()
    assert [float(each.sum()) for each in seen] == [6.0]


class Recomputed(keras.layers.Layer):
    """Has a checkpoint of activations that nobody has hooked."""

    checkpoint = staticmethod(torch.utils.checkpoint.checkpoint)

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)

    def call(self, x, training=False):
        def dropped(x):
            return keras.ops.tanh(self.dropout(x, training=training))

        return self.checkpoint(dropped, x, use_reentrant=False)


def test_a_dropout_that_may_not_find_its_mask_again_is_refused():
    with strategy(2).scope():
        dense = keras.layers.Dense(4)
        model = keras.Sequential([dense, Recomputed(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(UnsupportedModelError, match="by its whole name"):
        model.fit(X, Y, verbose=0)
