"""The public names are frozen, and importing them stays cheap."""

import copy
import importlib
import os
import pickle
import subprocess
import sys

import cloudpickle
import pytest

import keras_dist
from public_names import PUBLIC

NAMES = PUBLIC["keras_dist"]


def test_names_are_those():
    for module_name, names in PUBLIC.items():
        module = importlib.import_module(module_name)
        assert sorted(module.__all__) == module.__all__ == names
        assert all(hasattr(module, name) for name in names)


def test_every_public_name_has_a_docstring_with_an_example():
    for name in NAMES:
        thing = getattr(keras_dist, name)
        assert thing.__doc__, name
        if callable(thing) and not name.endswith("Error"):
            assert "Example:" in thing.__doc__, name


def test_errors_keep_the_builtin_that_tf_distribute_raises():
    for error, builtin in [
        (keras_dist.DeviceError, ValueError),
        (keras_dist.BackendNotFoundError, ImportError),
        (keras_dist.StrategyMismatchError, RuntimeError),
        (keras_dist.VirtualDevicesError, RuntimeError),
    ]:
        assert issubclass(error, builtin)
        assert issubclass(error, keras_dist.KerasDistError)


def _modules_after(statement, environment):
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return set(done.stdout.split())


def test_import_loads_no_framework_that_keras_does_not(monkeypatch):
    monkeypatch.delenv("KERAS_DIST_VIRTUAL_DEVICES", raising=False)
    environment = dict(os.environ)
    plain = _modules_after("import keras", environment)
    code = "import keras_dist\nkeras_dist.Strategy"
    ours = _modules_after(code, environment)
    frameworks = {"jax", "tensorflow", "torch"}
    assert ours & frameworks == plain & frameworks
    # What it loads beside its own modules, Keras has loaded already.
    others = {x for x in ours - plain if not x.startswith("keras_dist")}
    assert len(others) <= 0.01 * len(plain), sorted(others)


def test_import_loads_neither_keras_nor_arrays():
    code = "import keras_dist.plugins"
    found = _modules_after(code, dict(os.environ))
    assert not found & {"keras", "numpy", "jax", "tensorflow", "torch"}


def test_a_completion_shows_the_public_names_only():
    assert dir(keras_dist) == NAMES


@pytest.mark.parametrize(
    "statement",
    [
        "import keras_dist.plugins",
        "import keras_dist.core.context",
        "import keras_dist.cluster_resolver.base",
        "import keras_dist.fit.plain_models",
        "import keras_dist\nkeras_dist.CommunicationOptions",
    ],
)
def test_whatever_is_imported_first_devices_are_made(statement, monkeypatch):
    """Keras is imported in the midst of it, and then devices are made."""
    monkeypatch.setenv("KERAS_DIST_VIRTUAL_DEVICES", "3")
    code = f"{statement}\nimport keras_dist; print(keras_dist.list_devices())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cpu:2" in done.stdout


def test_a_function_is_compiled_where_no_strategy_was_made():
    """The default strategy is there though its module was not loaded."""
    code = (
        "import keras_dist, keras\n"
        "print(keras_dist.function(keras.ops.sum)(keras.ops.ones((3,))))\n"
        "print(keras_dist.OneDeviceStrategy('cpu:0'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "3." in done.stdout


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_the_package_is_pickled_by_its_name(pickler):
    assert pickle.loads(pickler.dumps(keras_dist)) is keras_dist


def test_a_copy_of_the_package_is_itself():
    assert copy.deepcopy(keras_dist) is keras_dist
    assert copy.copy(keras_dist) is keras_dist


def _uses_the_package():
    return keras_dist.__name__


def test_a_function_of_a_notebook_is_pickled_with_the_package():
    # A notebook's functions are those of `__main__`, pickled by value.
    _uses_the_package.__module__ = "__main__"
    assert pickle.loads(cloudpickle.dumps(_uses_the_package))() == "keras_dist"
