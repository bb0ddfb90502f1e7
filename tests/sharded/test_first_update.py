"""An optimizer that its first update builds loses nothing of that update."""

import keras
import numpy as np
import pytest
from keras import optimizers

import keras_dist
from gradients.helpers import array
from parity.harness import central
from sharded.helpers import mirrored
from sharded.helpers import sharded
from sharded.helpers import shards

STEPS = 4
SETTINGS = {
    "accumulation": lambda: optimizers.SGD(1.0, gradient_accumulation_steps=3),
    "momentum": lambda: optimizers.SGD(0.5, momentum=0.9, nesterov=True),
    "average": lambda: optimizers.SGD(
        0.5, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "adam": lambda: optimizers.Adam(0.1, amsgrad=True, global_clipnorm=0.5),
    "rmsprop": lambda: optimizers.RMSprop(0.1, momentum=0.5, centered=True),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "lion": lambda: optimizers.Lion(0.1),
    "nadam": lambda: optimizers.Nadam(0.1),
    "loss_scale": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.1), initial_scale=4.0, dynamic_growth_steps=2
    ),
    "loss_scale_of_accumulation": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.5, momentum=0.9, gradient_accumulation_steps=2),
        initial_scale=4.0,
    ),
}
settings = pytest.mark.parametrize("setting", SETTINGS)


def _updated(make, run):
    """Variables and the optimizer's, after some updates from the first on."""
    variables = [
        keras.Variable([1.0, 2.0, 5.0], name="vector"),
        keras.Variable(2.0, name="scalar"),
    ]
    optimizer = make()
    for step in range(1, STEPS + 1):
        grads = [
            keras.ops.convert_to_tensor(np.float32([1.0, -2.0, 0.5]) * step),
            keras.ops.convert_to_tensor(np.float32(step)),
        ]
        run(lambda grads: optimizer.apply(grads, variables), grads)
    return [array(v) for v in [*variables, *optimizer.variables]]


def _called(fn, grads):
    fn(grads)


def _on_one_device(fn, grads):
    # On JAX, Keras alone can't apply an optimizer that scales losses.
    keras_dist.get_strategy().run(fn, args=(grads,))


def _assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for own, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


@shards
@settings
def test_outside_of_run(setting):
    expected = _updated(SETTINGS[setting], _on_one_device)
    with sharded(2).scope():
        _assert_same(_updated(SETTINGS[setting], _called), expected)


@shards
def test_an_update_that_fails_leaves_slots_as_they_were():
    with sharded(2).scope():
        variable, other = keras.Variable([1.0, 2.0]), keras.Variable(1.0)
        optimizer = optimizers.SGD(0.5, momentum=0.5)
        grads = [keras.ops.ones(2)]
        optimizer.apply(grads, [variable])
        with pytest.raises(ValueError, match="Unknown variable"):
            optimizer.apply([keras.ops.ones(())], [other])
        optimizer.apply(grads, [variable])
        np.testing.assert_allclose(array(variable), [-0.25, 0.75])
        np.testing.assert_allclose(array(optimizer.variables[2]), [-0.75] * 2)


KINDS = {"mirrored": mirrored, "sharded": sharded, "central": central}


@settings
@pytest.mark.parametrize(
    "kind", ["mirrored", pytest.param("sharded", marks=shards), "central"]
)
def test_in_run(setting, kind):
    expected = _updated(SETTINGS[setting], _on_one_device)
    strategy = KINDS[kind](2)

    def run(fn, grads):
        # Each replica has half of the gradient; they are summed.
        strategy.run(fn, args=([grad / 2.0 for grad in grads],))

    with strategy.scope():
        _assert_same(_updated(SETTINGS[setting], run), expected)


@shards
@pytest.mark.filterwarnings("ignore:The model does not have any trainable")
def test_a_model_without_trainable_weights():
    with sharded(2).scope():
        frozen = keras.layers.Dense(1, trainable=False)
        model = keras.Sequential([keras.Input((3,)), frozen])
        model.compile("adam", "mse")
    before = frozen.kernel.numpy()
    x = np.ones((6, 3), "float32")
    logs = model.fit(x, x[:, :1], batch_size=4, verbose=0).history
    loss = model.evaluate(x, x[:, :1], verbose=0)
    assert logs["loss"][0] == pytest.approx(loss, rel=1e-5)
    np.testing.assert_array_equal(frozen.kernel.numpy(), before)
