"""Strategies take the devices that are there, in any spelling, and name others.

They are made against the in-memory backend.
"""

import gc
import weakref

import keras
import pytest

import keras_dist
from keras_dist.core.device import Device
from keras_dist.core.device import parse_device
from keras_dist.plugin.backend import override_backend
from keras_dist.testing import MemoryBackend

CENTRAL = [
    keras_dist.CentralStorageStrategy,
    keras_dist.experimental.CentralStorageStrategy,
    keras_dist.compat.v1.CentralStorageStrategy,
]
CPUS = [Device("cpu", 0), Device("cpu", 1)]
GPUS = [Device("gpu", 0), Device("gpu", 1)]


@pytest.fixture(autouse=True)
def backend():
    with override_backend(MemoryBackend([*GPUS, *CPUS])) as backend:
        yield backend


def names(strategy):
    extended = strategy.extended
    return extended.worker_devices, extended.parameter_devices


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("spelling", "device"),
    [
        ("cpu:1", "cpu:1"),
        ("CPU:1", "cpu:1"),
        ("cpu", "cpu:0"),
        ("/gpu:0", "gpu:0"),
        ("GPU:0", "gpu:0"),
        ("cuda:3", "gpu:3"),
        ("/device:TPU:7", "tpu:7"),
        ("/job:localhost/replica:0/task:0/device:GPU:0", "gpu:0"),
        (" cpu:0 ", "cpu:0"),
    ],
)
def test_spellings(spelling, device):
    assert str(parse_device(spelling)) == device


@pytest.mark.parametrize(
    "spelling", ["", "cpu:", "cpu:-1", "disk:0", "cpu:0:1", 0, None, "gpu 0"]
)
def test_unreadable_spellings_are_named(spelling):
    with pytest.raises(keras_dist.DeviceError, match="Received: ") as error:
        parse_device(spelling)
    assert repr(spelling) in str(error.value)


@pytest.mark.parametrize("none", [None, []])
def test_default_is_all_accelerators_else_all_cpus(none):
    strategy = keras_dist.MirroredStrategy(none)
    assert strategy.num_replicas_in_sync == 2
    assert repr(strategy) == "<MirroredStrategy on gpu:0, gpu:1>"
    with override_backend(MemoryBackend(CPUS)):
        strategy = keras_dist.MirroredStrategy(none)
        assert repr(strategy) == "<MirroredStrategy on cpu:0, cpu:1>"


@pytest.mark.parametrize("central", CENTRAL)
def test_defaults_of_central_storage(central):
    assert names(central()) == (("gpu:0", "gpu:1"), ("cpu:0",))
    assert names(central([])) == names(central())
    assert names(central(["gpu:1"])) == (("gpu:1",), ("gpu:1",))
    assert names(central("/gpu:1", "CPU:1")) == (("gpu:1",), ("cpu:1",))
    for devices, expected in (
        (GPUS[:1] + CPUS, (("gpu:0",), ("gpu:0",))),
        (CPUS, (("cpu:0", "cpu:1"), ("cpu:0",))),
        (CPUS[:1], (("cpu:0",), ("cpu:0",))),
    ):
        with override_backend(MemoryBackend(devices)):
            assert names(central()) == expected


def test_any_iterable_in_any_spelling():
    strategy = keras_dist.CentralStorageStrategy(
        (f"/job:localhost/device:GPU:{i}" for i in (1, 0)),
        iter(["cpu:1", "CPU:0"]),
    )
    assert names(strategy) == (("gpu:1", "gpu:0"), ("cpu:1", "cpu:0"))
    assert repr(strategy) == (
        "<CentralStorageStrategy on gpu:1, gpu:0, variables on cpu:1, cpu:0>"
    )


@pytest.mark.parametrize("central", CENTRAL)
@pytest.mark.parametrize("argument", ["compute_devices", "parameter_device"])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("cpu:7", "'cpu:7' does not exist.*: gpu:0, gpu:1, .*set_virtual_dev"),
        (["cpu:0", "gpu:2"], "'gpu:2' does not exist.*cpu:0"),
        (["cpu:0", "/CPU:0"], "'cpu:0' is named 2 times.*each device once"),
        ("disk:0", "could not be read.*'disk:0'"),
        ("", "could not be read.*''"),
        (3, "type int.*Expected: a string"),
        ([3], "could not be read.*3"),
        ([None], "could not be read.*None"),
    ],
)
def test_what_is_no_device(central, argument, wrong, says):
    with pytest.raises(keras_dist.DeviceError, match=f"(?s){says}") as error:
        central(**{argument: wrong})
    assert argument in str(error.value)


@pytest.mark.parametrize("nothing", [[], (), iter(())])
def test_variables_have_to_live_somewhere(nothing):
    with pytest.raises(
        keras_dist.DeviceError, match="(?s)parameter_device=.*None"
    ):
        keras_dist.CentralStorageStrategy(parameter_device=nothing)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (None, "takes one device.*device=None"),
        ([], "takes one device.*MirroredStrategy"),
        (["cpu:0"], "takes one device.*of type list"),
        (["cpu:0", "cpu:1"], "takes one device"),
        (0, "takes one device.*of type int"),
        ("cpu:7", "'cpu:7' does not exist"),
        ("disk", "could not be read.*'disk'"),
    ],
)
@pytest.mark.parametrize(
    "one",
    [keras_dist.OneDeviceStrategy, keras_dist.compat.v1.OneDeviceStrategy],
)
def test_one_device_is_one(one, wrong, says):
    with pytest.raises(keras_dist.DeviceError, match=f"(?s){says}"):
        one(wrong)


def test_devices_are_listed_and_cpus_are_split():
    every = ["gpu:0", "gpu:1", "cpu:0", "cpu:1"]
    assert keras_dist.list_devices() == every
    keras_dist.set_virtual_devices(3)
    assert keras_dist.list_devices("CPU") == ["cpu:0", "cpu:1", "cpu:2"]
    with pytest.raises(keras_dist.DeviceError, match="'disk'"):
        keras_dist.list_devices("disk")
    with pytest.raises(keras_dist.DeviceError, match="'gpu'"):
        keras_dist.set_virtual_devices(2, "gpu")
    for wrong in (0, -1, 2.0, "2", True):
        with pytest.raises(ValueError, match="Received: "):
            keras_dist.set_virtual_devices(wrong)


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


def test_any_backend_is_told_of_models_variables_and_failures(backend):
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
    with pytest.raises(ValueError, match="compile"):
        model.fit([[1.0, 2.0, 3.0]], [[1.0, 2.0]], verbose=0)
    assert executor.recovered == [model]
    # Outside of the scope, `compile` belongs to the strategy.
    model.compile("adam", "mse")
    assert model.optimizer.variables[0].distribute_strategy is strategy
    for _ in range(2):
        assert strategy.distribute(plain) is plain
    assert {id(v) for v in plain.variables} <= {*map(id, executor.placed)}
    assert strategy.devices_of(plain.weights[0]) == ("gpu:0", "gpu:1")
    with pytest.raises(ValueError, match=r"(?s)keras.Model.*Received: 'model'"):
        strategy.distribute("model")


def test_a_backend_without_strategies_of_its_own_says_so():
    with pytest.raises(
        TypeError, match="(?s)no native strategies.*Received: 'native'"
    ):
        keras_dist.Strategy.from_native("native")
