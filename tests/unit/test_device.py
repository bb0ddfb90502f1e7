"""Devices as people write them."""

import pytest

from keras_dist.core.device import Device
from keras_dist.core.device import parse_device
from keras_dist.core.device import resolve_devices
from keras_dist.errors import DeviceError

CPUS = (Device("cpu", 0), Device("cpu", 1))
GPU = Device("gpu", 0)


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
    with pytest.raises(DeviceError, match="Received: ") as error:
        parse_device(spelling)
    assert repr(spelling) in str(error.value)


@pytest.mark.parametrize("none", [None, []])
def test_default_is_all_accelerators_else_all_cpus(none):
    assert resolve_devices(none, (*CPUS, GPU)) == (GPU,)
    assert resolve_devices(none, CPUS) == CPUS


def test_order_is_kept():
    assert resolve_devices(["cpu:1", "cpu:0"], CPUS) == CPUS[::-1]


def test_absent_device_lists_what_there_is():
    with pytest.raises(DeviceError, match="cpu:0, cpu:1.*set_virtual_devices"):
        resolve_devices(["cpu:0", "cpu:7"], CPUS)


def test_repeated_device_in_two_spellings():
    with pytest.raises(DeviceError, match="'cpu:1' is named 2 times"):
        resolve_devices(["cpu:1", "/device:CPU:1"], CPUS)
