"""CentralStorageStrategy and OneDeviceStrategy: which devices they take."""

import pytest

import keras_dist
from keras_dist.core.device import Device
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


@pytest.mark.parametrize("central", CENTRAL)
def test_defaults(central):
    assert names(central()) == (("gpu:0", "gpu:1"), ("cpu:0",))
    assert names(central([])) == names(central())
    assert names(central(["gpu:1"])) == (("gpu:1",), ("gpu:1",))
    assert names(central("/gpu:1", "CPU:1")) == (("gpu:1",), ("cpu:1",))


def test_defaults_by_what_there_is():
    for devices, expected in (
        (GPUS[:1] + CPUS, (("gpu:0",), ("gpu:0",))),
        (CPUS, (("cpu:0", "cpu:1"), ("cpu:0",))),
        (CPUS[:1], (("cpu:0",), ("cpu:0",))),
    ):
        with override_backend(MemoryBackend(devices)):
            assert names(keras_dist.CentralStorageStrategy()) == expected


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
        ("cpu:7", r"'cpu:7' does not exist.*Available: gpu:0, gpu:1, cpu:0"),
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
    with pytest.raises(keras_dist.DeviceError, match=says) as error:
        central(**{argument: wrong})
    assert argument in str(error.value)


@pytest.mark.parametrize("nothing", [[], (), iter(())])
def test_variables_have_to_live_somewhere(nothing):
    with pytest.raises(keras_dist.DeviceError, match="parameter_device=.*None"):
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
    with pytest.raises(keras_dist.DeviceError, match=says):
        one(wrong)
