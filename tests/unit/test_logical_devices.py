"""Replicas have logical devices in order, where a backend has them."""

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.core.device import Device
from keras_dist.core.plan import Plan
from keras_dist.plugin.backend import override_backend
from keras_dist.plugin.capabilities import HasLogicalDevices
from keras_dist.testing import MemoryBackend

CPUS = [Device("cpu", index) for index in range(4)]
LAYOUTS = {".*/kernel": (None, "logical")}


class LogicalBackend(MemoryBackend, HasLogicalDevices):
    """A backend that has them, and places nothing."""

    def logical_executor(self, plan):
        return self.executor(plan)


@pytest.fixture
def backend():
    with override_backend(LogicalBackend(CPUS)) as made:
        yield made


@pytest.fixture
def strategy(backend):
    return keras_dist.MirroredStrategy(logical_devices=2)


def test_replicas_have_devices_in_order(strategy):
    assert strategy.num_replicas_in_sync == 2
    assert strategy.plan.replicas == (tuple(CPUS[:2]), tuple(CPUS[2:]))
    assert strategy.plan.variable_devices == tuple(CPUS)
    assert repr(strategy) == "<MirroredStrategy on cpu:0+cpu:1, cpu:2+cpu:3>"


def test_one_replica_of_all_devices_is_not_one_device(backend):
    plan = keras_dist.MirroredStrategy(logical_devices=4).plan
    assert (plan.num_replicas, plan.num_logical_devices) == (1, 4)
    assert not plan.is_one_device


@pytest.mark.parametrize("wrong", [[1, 1], [2, 2], [1, 3], [2], 2])
def test_a_split_has_to_fit(strategy, wrong):
    with pytest.raises(ValueError, match="partition_dimensions"):
        strategy.experimental_split_to_logical_devices(np.ones((2, 4)), wrong)


def test_a_size_that_is_not_known_yet_is_not_checked(strategy):
    x = keras.KerasTensor((None, 4))
    split = strategy.experimental_split_to_logical_devices
    assert split(x, [2, 1]) is x


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        *(
            ({"logical_devices": n}, ValueError, "`logical_devices`.*at least")
            for n in (0, -2, 1.5, "2")
        ),
        (
            {"logical_devices": 3},
            keras_dist.DeviceError,
            r"logical_devices=3 and 4 device\(s\)",
        ),
        ({"layout_map": LAYOUTS}, ValueError, "`logical_devices=n` too"),
        (
            {
                "cross_device_ops": keras_dist.ReductionToOneDevice(),
                "logical_devices": 2,
            },
            ValueError,
            "No CrossDeviceOps does this",
        ),
    ],
)
def test_options_that_can_not_be(backend, options, kind, says):
    with pytest.raises(kind, match=f"(?s){says}"):
        keras_dist.MirroredStrategy(**options)
    if "cross_device_ops" not in options and kind is ValueError:
        with pytest.raises(kind, match=f"(?s){says}"):
            keras_dist.MultiWorkerMirroredStrategy(object(), **options)


def test_one_worker_of_a_strategy_for_several(backend):
    strategy = keras_dist.MultiWorkerMirroredStrategy(
        logical_devices=2, layout_map=LAYOUTS
    )
    assert strategy.plan.replicas == (tuple(CPUS[:2]), tuple(CPUS[2:]))
    strategy = keras_dist.MirroredStrategy(
        logical_devices=1, layout_map=LAYOUTS
    )
    assert strategy.plan.replicas == tuple((device,) for device in CPUS)


@pytest.mark.only_on("tensorflow", "torch", reason="JAX has them.")
@pytest.mark.runs_on("tensorflow", "torch")
def test_the_error_says_which_backend_has_them():
    expected = rf"'{keras.backend.backend()}'.*Received: 2 logical.*'jax'"
    with pytest.raises(ValueError, match=f"(?s){expected}"):
        keras_dist.MirroredStrategy(
            ["cpu:0"], logical_devices=2, layout_map=LAYOUTS
        )
    with pytest.raises(ValueError, match=f"(?s){expected}"):
        # Nobody asks the resolver for other workers.
        keras_dist.MultiWorkerMirroredStrategy(object(), logical_devices=2)
    plan = Plan((tuple(CPUS[:2]),), tuple(CPUS[:2]))
    with pytest.raises(ValueError, match=f"(?s){expected}"):
        keras_dist.Strategy(plan)


def test_a_backend_without_them():
    with (
        override_backend(MemoryBackend(CPUS)),
        pytest.raises(ValueError, match="computes on one device"),
    ):
        keras_dist.MirroredStrategy(logical_devices=2)
