"""The public names stay as they are, and importing them stays cheap."""

import copy
import importlib
import pickle

import cloudpickle
import pytest

import keras_dist
from errors.helpers import run_python
from public_names import PUBLIC

NAMES = PUBLIC["keras_dist"]


def test_names_are_those():
    for module_name, names in PUBLIC.items():
        module = importlib.import_module(module_name)
        assert sorted(module.__all__) == module.__all__ == names
        assert all(hasattr(module, name) for name in names)
    # Which are what a completion shows.
    assert dir(keras_dist) == NAMES


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


def _run(code, **environment):
    done = run_python(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _modules_after(statement):
    modules = "import sys\nprint('\\n'.join(sys.modules))"
    return set(_run(f"{statement}\n{modules}").split())


def test_import_loads_no_framework_that_keras_does_not():
    plain = _modules_after("import keras")
    ours = _modules_after("import keras_dist\nkeras_dist.Strategy")
    frameworks = {"jax", "tensorflow", "torch"}
    assert ours & frameworks == plain & frameworks
    # What it loads beside its own modules, Keras has loaded already.
    others = {x for x in ours - plain if not x.startswith("keras_dist")}
    assert len(others) <= 0.01 * len(plain), sorted(others)
    found = _modules_after("import keras_dist.plugins")
    assert not found & {"keras", "numpy", *frameworks}


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
def test_whatever_is_imported_first_devices_are_made(statement):
    """Keras is imported in the midst of it, and then devices are made."""
    code = f"{statement}\nimport keras_dist; print(keras_dist.list_devices())"
    assert "cpu:2" in _run(code, KERAS_DIST_VIRTUAL_DEVICES="3")


def test_a_function_is_compiled_where_no_strategy_was_made():
    """The default strategy is there though its module was not loaded."""
    code = (
        "import keras_dist, keras\n"
        "print(keras_dist.function(keras.ops.sum)(keras.ops.ones((3,))))\n"
        "print(keras_dist.OneDeviceStrategy('cpu:0'))\n"
    )
    assert "3." in _run(code)


def _uses_the_package():
    return keras_dist.__name__


def test_the_package_is_copied_and_pickled_by_its_name():
    for copied in (
        copy.copy(keras_dist),
        copy.deepcopy(keras_dist),
        pickle.loads(pickle.dumps(keras_dist)),
        pickle.loads(cloudpickle.dumps(keras_dist)),
    ):
        assert copied is keras_dist
    # A notebook's functions are those of `__main__`, pickled by value.
    _uses_the_package.__module__ = "__main__"
    assert pickle.loads(cloudpickle.dumps(_uses_the_package))() == "keras_dist"
