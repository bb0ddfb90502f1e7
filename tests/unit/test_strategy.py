"""Strategies, scopes and contexts, against the in-memory backend."""

import gc
import weakref

import keras
import pytest

import keras_dist
from keras_dist.core.device import Device
from keras_dist.plugin.backend import override_backend
from keras_dist.testing import MemoryBackend


@pytest.fixture
def backend():
    with override_backend(MemoryBackend()) as backend:
        yield backend


def test_default_is_all_accelerators(backend):
    strategy = keras_dist.MirroredStrategy()
    assert strategy.num_replicas_in_sync == 2
    assert [str(d) for d in strategy.plan.devices] == ["gpu:0", "gpu:1"]
    assert repr(strategy) == "<MirroredStrategy on gpu:0, gpu:1>"


def test_without_accelerators_all_cpus():
    cpus = [Device("cpu", i) for i in range(3)]
    with override_backend(MemoryBackend(cpus)):
        assert keras_dist.MirroredStrategy().num_replicas_in_sync == 3


def test_one_device(backend):
    strategy = keras_dist.OneDeviceStrategy("/gpu:1")
    assert strategy.num_replicas_in_sync == 1
    assert str(strategy.plan.primary) == "gpu:1"


def test_listing_devices(backend):
    assert keras_dist.list_devices() == ["gpu:0", "gpu:1", "cpu:0"]
    assert keras_dist.list_devices("CPU") == ["cpu:0"]
    with pytest.raises(keras_dist.DeviceError, match="'disk'"):
        keras_dist.list_devices("disk")


def test_virtual_devices(backend):
    keras_dist.set_virtual_devices(3)
    assert keras_dist.list_devices("cpu") == ["cpu:0", "cpu:1", "cpu:2"]


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "2", True])
def test_virtual_devices_take_a_positive_integer(backend, wrong):
    with pytest.raises(ValueError, match="Received: "):
        keras_dist.set_virtual_devices(wrong)


def test_only_the_cpu_can_be_split(backend):
    with pytest.raises(keras_dist.DeviceError, match="'gpu'"):
        keras_dist.set_virtual_devices(2, "gpu")


def test_scope_binds_models_and_places_variables(backend):
    strategy = keras_dist.MirroredStrategy()
    (executor,) = backend.executors
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert any(bound is model for bound in executor.bound)
    assert not any(bound is plain for bound in executor.bound)
    placed = {id(variable) for variable in executor.placed}
    assert {id(v) for v in model.variables} <= placed
    assert not {id(v) for v in plain.variables} & placed


def test_a_cycle_with_a_variable_is_collected(backend):
    """Python 3.13.0 did not see the attributes of one whose class changed."""
    strategy = keras_dist.MirroredStrategy()
    with strategy.scope():
        strategy.own_variable = keras.Variable(1.0)
    collected = weakref.ref(strategy)
    backend.executors.clear()
    del strategy
    gc.collect()
    assert collected() is None


def test_compile_outside_of_the_scope_belongs_to_the_strategy(backend):
    strategy = keras_dist.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    assert model.optimizer.variables[0].distribute_strategy is strategy


def test_distribute_adopts_a_model(backend):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    strategy = keras_dist.MirroredStrategy()
    assert strategy.distribute(model) is model
    assert strategy.distribute(model) is model
    (executor,) = backend.executors
    placed = {id(variable) for variable in executor.placed}
    assert {id(v) for v in model.variables} <= placed
    assert strategy.devices_of(model.weights[0]) == ("gpu:0", "gpu:1")


def test_distribute_takes_models(backend):
    with pytest.raises(ValueError, match=r"keras.Model.*Received: 'model'"):
        keras_dist.MirroredStrategy().distribute("model")


def test_failures_are_reported_to_the_executor(backend):
    strategy = keras_dist.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="compile"):
        model.fit([[1.0, 2.0, 3.0]], [[1.0, 2.0]], verbose=0)
    assert backend.executors[0].recovered == [model]


def test_cross_device_ops_are_objects(backend):
    with pytest.raises(TypeError, match="cross_device_ops.*'nccl'.*str"):
        keras_dist.MirroredStrategy(cross_device_ops="nccl")


def test_a_backend_without_strategies_of_its_own_says_so(backend):
    with pytest.raises(
        TypeError, match="no native strategies.*Received: 'native'"
    ):
        keras_dist.Strategy.from_native("native")
