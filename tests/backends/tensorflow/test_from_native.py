"""Strategies of TensorFlow's own are taken over."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dist

NATIVE = {
    "mirrored": lambda: tf.distribute.MirroredStrategy(["cpu:1", "cpu:3"]),
    "mirrored_v1": lambda: tf.compat.v1.distribute.MirroredStrategy(
        ["cpu:1", "cpu:3"]
    ),
    "one": lambda: tf.distribute.OneDeviceStrategy("cpu:2"),
    "one_v1": lambda: tf.compat.v1.distribute.OneDeviceStrategy("cpu:2"),
}
DEVICES = {"mirrored": ("cpu:1", "cpu:3"), "one": ("cpu:2",)}


@pytest.mark.parametrize("kind", NATIVE)
def test_devices_are_the_same(kind):
    native = NATIVE[kind]()
    strategy = keras_dist.Strategy.from_native(native)
    devices = DEVICES[kind.removesuffix("_v1")]
    assert strategy.extended.worker_devices == devices
    assert strategy.extended.parameter_devices == devices
    assert strategy.num_replicas_in_sync == native.num_replicas_in_sync


def test_it_runs_and_trains_as_ours():
    strategy = keras_dist.MirroredStrategy.from_native(NATIVE["mirrored"]())
    ids = strategy.run(
        lambda: keras_dist.get_replica_context().replica_id_in_sync_group
    )
    assert ids.values == (0, 1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    history = model.fit(
        np.ones((5, 3)), np.ones((5, 1)), batch_size=2, epochs=2, verbose=0
    )
    first, last = history.history["loss"]
    assert last < first
    assert strategy.devices_of(model.weights[0]) == ("cpu:1", "cpu:3")


@pytest.mark.parametrize("wrong", [None, "mirrored", keras_dist.get_strategy])
def test_what_is_none_of_them_is_refused(wrong):
    with pytest.raises(TypeError, match="(?s)taken over.*Received"):
        keras_dist.Strategy.from_native(wrong)


def test_the_native_default_strategy_is_refused():
    with pytest.raises(TypeError, match="(?s)taken over.*Received"):
        keras_dist.Strategy.from_native(tf.distribute.get_strategy())


@pytest.mark.parametrize(
    "kind",
    [
        tf.distribute.TPUStrategy,
        tf.distribute.experimental.TPUStrategy,
        tf.compat.v1.distribute.experimental.TPUStrategy,
    ],
)
def test_one_of_a_tpu_is_refused(kind):
    # The constructors need a TPU, and this check looks at the class only.
    native = kind.__new__(kind)
    with pytest.raises(
        TypeError, match="(?s)one program for all cores.*KERAS_BACKEND=jax"
    ):
        keras_dist.Strategy.from_native(native)
