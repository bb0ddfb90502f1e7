"""A new kind of storage is a `Storage` and the executor that has it."""

import copy

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.plugins import override_backend
from keras_dist.plugins import parse_device

pytestmark = pytest.mark.only_on(
    "torch", reason="The backend that it is added to is written for PyTorch."
)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2, 12, 3)).astype("float32")


@pytest.fixture
def strategy():
    """Keeps matrices on a spare device, and copies of the other variables."""
    from conformance.fourth import FourthBackend
    from conformance.fourth import FourthReplicas
    from conformance.fourth import FourthStorage

    class ParkedStorage(FourthStorage):
        kind = "parked"
        devices = (parse_device("cpu:3"),)

    class ParkingReplicas(FourthReplicas):
        def storage(self, variable):
            if len(variable.shape) == 2:
                return ParkedStorage(variable, self)
            return super().storage(variable)

    class ParkingBackend(FourthBackend):
        def executor(self, plan):
            if plan.is_one_device:
                return super().executor(plan)
            return ParkingReplicas(plan)

    with override_backend(ParkingBackend()):
        yield keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])


def compiled():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


def test_it_is_placed_read_saved_and_told(strategy, tmp_path):
    plain = compiled()
    plain.fit(X, Y, batch_size=5, shuffle=False, verbose=0)
    with strategy.scope():
        model = compiled()
    model.fit(X, Y, batch_size=5, shuffle=False, verbose=0)
    weights = model.get_weights()
    for ours, theirs in zip(weights, plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)

    kernel = model.layers[0].kernel
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    strategy.run(lambda: kernel.assign(keras.ops.ones((3, 3))))
    np.testing.assert_array_equal(model.get_weights()[0], np.ones((3, 3)))
    model.load_weights(path)
    np.testing.assert_array_equal(model.get_weights()[0], weights[0])

    parked = [kernel, copy.deepcopy(kernel), model.optimizer.variables[2]]
    for variable in parked:
        assert strategy.devices_of(variable) == ("cpu:3",)
    assert strategy.devices_of(model.layers[0].bias) == ("cpu:0", "cpu:1")
    assert "parked" in str(keras_dist.summary(model))
