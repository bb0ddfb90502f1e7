"""The public names are frozen, and importing them stays cheap."""

import importlib
import os
import subprocess
import sys

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
    ours = _modules_after("import keras_dist", environment)
    frameworks = {"jax", "tensorflow", "torch"}
    assert ours & frameworks == plain & frameworks
    # What it loads beside its own modules, Keras has loaded already.
    others = {x for x in ours - plain if not x.startswith("keras_dist")}
    assert len(others) <= 0.01 * len(plain), sorted(others)
