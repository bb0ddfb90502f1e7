"""`keras.utils.clear_session` ends no scope, and loses no training."""

import keras
import numpy as np
import pytest

import keras_dist
from gradients.helpers import array

X = np.arange(12.0, dtype="float32").reshape(6, 2)
Y = X[:, :1]
KINDS = {
    "default": keras_dist.get_strategy,
    "one": lambda: keras_dist.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central": lambda: keras_dist.CentralStorageStrategy(
        ["cpu:0", "cpu:1"], "cpu:2"
    ),
}


def _fit(model, clears=False):
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: keras.utils.clear_session() if clears else None
    )
    options = {"batch_size": 4, "epochs": 2, "verbose": 0}
    return model.fit(X, Y, callbacks=[callback], **options).history["loss"]


def _trained(strategy, clear):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        clear()
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.001, momentum=0.9), "mse")
        clear()
    clear()
    losses = _fit(model)
    clear()
    with strategy.scope(), strategy.scope():
        clear()
        losses += _fit(model, clears=clear is not _nothing)
        clear()
        model.predict(X, verbose=0)
    return losses, [array(v) for v in model.weights]


def _nothing():
    """Clears nothing."""


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_in_scopes_and_between_fits(kind):
    strategy = KINDS[kind]()
    expected, expected_weights = _trained(strategy, _nothing)
    assert not keras_dist.has_strategy()
    losses, weights = _trained(strategy, keras.utils.clear_session)
    assert not keras_dist.has_strategy()
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for own, theirs in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=1e-6)


@pytest.mark.parametrize("synchronization", ["on_read", "auto"])
def test_in_a_replica_function(synchronization):
    """Replicas would no longer be kept apart: it is refused."""
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        count = keras.Variable(
            0.0,
            trainable=False,
            synchronization=synchronization,
            aggregation="sum" if synchronization == "on_read" else "mean",
        )

        def count_two():
            count.assign_add(1.0)
            keras.utils.clear_session()
            count.assign_add(1.0)

        # TensorFlow's own words, or ours.
        with pytest.raises((AssertionError, ValueError)):
            strategy.run(count_two)
        assert keras_dist.get_strategy() is strategy
        assert keras_dist.in_cross_replica_context()
    assert not keras_dist.has_strategy()
    # The next function is kept apart as ever.
    ids = strategy.run(
        lambda: keras_dist.get_replica_context().replica_id_in_sync_group
    )
    assert strategy.experimental_local_results(ids) == (0, 1)
