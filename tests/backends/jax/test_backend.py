"""Devices of JAX, virtual ones, and the private names we use."""

import subprocess
import sys
import textwrap

import jax
import keras
import pytest

import keras_dist
from keras_dist.core.device import Device
from keras_dist.core.plan import Plan


def run(code):
    """Runs code in a process of its own, where nothing has started."""
    lines = textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", lines],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_devices_are_those_of_jax():
    assert keras_dist.list_devices("cpu") == [
        f"cpu:{i}" for i in range(len(jax.devices("cpu")))
    ]


def test_virtual_devices_too_late():
    done = run(
        """
        import os
        os.environ.pop("KERAS_DIST_VIRTUAL_DEVICES", None)
        import keras_dist
        keras_dist.set_virtual_devices(3)
        keras_dist.set_virtual_devices(2)
        assert keras_dist.list_devices() == ["cpu:0", "cpu:1"]
        keras_dist.set_virtual_devices(2)
        try:
            keras_dist.set_virtual_devices(4)
        except keras_dist.VirtualDevicesError as error:
            print(error)
        assert keras_dist.list_devices() == ["cpu:0", "cpu:1"]
        """
    )
    assert done.returncode == 0, done.stderr
    assert "Received: num_devices=4. Expected: 2" in done.stdout
    assert "KERAS_DIST_VIRTUAL_DEVICES" in done.stdout


def test_devices_of_two_types_are_refused():
    from keras_dist_jax.backend import mesh_of

    plan = Plan(
        ((Device("cpu", 0),), (Device("gpu", 0),)),
        (Device("cpu", 0), Device("gpu", 0)),
    )
    with pytest.raises(keras_dist.DeviceError, match="one type.*cpu:0, gpu:0"):
        mesh_of(plan)


def test_the_private_names_are_there():
    variable = keras.Variable(1.0)
    model = keras.Sequential([keras.layers.Dense(1)])
    for name in ("_value", "_initializer"):
        assert hasattr(variable, name), f"Keras moved Variable.{name}"
    for name in (
        "_get_jax_state",
        "jax_state_sync",
        "_jax_state_synced",
        "_make_function",
        "_losses_override",
    ):
        assert hasattr(model, name), f"Keras moved Model.{name}"


def test_the_private_state_is_emptied(make_model, data):
    model = make_model(2)
    model.fit(*data, verbose=0)
    assert model._jax_state is None
