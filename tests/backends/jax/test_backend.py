"""Devices are those of JAX, virtual ones included, and of one type."""

import os
import subprocess
import sys

import jax
import pytest

import keras_dist
from keras_dist.core.device import Device
from keras_dist.core.plan import Plan


def test_devices_are_those_of_jax():
    assert keras_dist.list_devices("cpu") == [
        f"cpu:{i}" for i in range(len(jax.devices("cpu")))
    ]


def test_virtual_devices_may_change_until_jax_starts():
    code = """if True:
        import keras_dist
        keras_dist.set_virtual_devices(3)
        keras_dist.set_virtual_devices(2)
        assert keras_dist.list_devices() == ["cpu:0", "cpu:1"]
        keras_dist.set_virtual_devices(2)
        """
    environment = {**os.environ, "KERAS_DIST_VIRTUAL_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_devices_of_two_types_are_refused():
    from keras_dist_jax.backend import mesh_of

    plan = Plan(
        ((Device("cpu", 0),), (Device("gpu", 0),)),
        (Device("cpu", 0), Device("gpu", 0)),
    )
    with pytest.raises(
        keras_dist.DeviceError, match="(?s)one type.*cpu:0, gpu:0"
    ):
        mesh_of(plan)


def test_the_private_state_is_emptied(make_model, data):
    model = make_model(2)
    model.fit(*data, verbose=0)
    assert model._jax_state is None
