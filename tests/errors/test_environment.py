"""What is wrong with an installation is said when it is first needed."""

import importlib.metadata

import keras
import pytest

import keras_dist
from errors.helpers import run_python
from keras_dist.plugin import backend as backend_module


@pytest.fixture
def entry_points(monkeypatch):
    """Replaces the installed plugins."""

    def replace(*found):
        # Past the cache: the plugin in use keeps its devices.
        load = backend_module._load
        uncached = getattr(load, "__wrapped__", load)
        monkeypatch.setattr(backend_module, "_load", uncached)
        monkeypatch.setattr(
            backend_module, "entry_points", lambda group: list(found)
        )

    return replace


def test_no_plugin_for_the_backend_or_no_framework(entry_points):
    entry_points()
    name = keras.backend.backend()
    with pytest.raises(keras_dist.BackendNotFoundError, match=name):
        keras_dist.MirroredStrategy()
    entry_points(
        importlib.metadata.EntryPoint(
            name, "no_such_framework:Backend", backend_module.ENTRY_POINT_GROUP
        )
    )
    with pytest.raises(
        keras_dist.BackendNotFoundError,
        match=rf"(?s)no_such_framework.*keras-dist\[{name}\]",
    ):
        keras_dist.list_devices()


def test_virtual_devices_too_late():
    done = run_python(
        "import keras_dist\n"
        "keras_dist.MirroredStrategy()\n"
        "import keras\n"
        "keras.ops.ones(2)\n"
        "keras_dist.set_virtual_devices(3)\n"
    )
    assert "VirtualDevicesError" in done.stderr
    assert "KERAS_DIST_VIRTUAL_DEVICES" in done.stderr


@pytest.mark.smoke
def test_virtual_devices_from_the_environment():
    done = run_python(
        "import keras_dist\nprint(keras_dist.list_devices('cpu'))",
        KERAS_DIST_VIRTUAL_DEVICES="3",
    )
    assert "['cpu:0', 'cpu:1', 'cpu:2']" in done.stdout, done.stderr
    code = "import keras_dist\nimport keras"
    done = run_python(code, KERAS_DIST_VIRTUAL_DEVICES="many")
    assert "KERAS_DIST_VIRTUAL_DEVICES must be an integer" in done.stderr
    assert "'many'" in done.stderr


def test_nnx_mode_is_refused(monkeypatch):
    monkeypatch.setattr(keras.config, "is_nnx_enabled", lambda: True)
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    with (
        strategy.scope(),
        pytest.raises(keras_dist.UnsupportedKerasError, match="NNX"),
    ):
        keras.Sequential([keras.layers.Dense(1)])


@pytest.mark.parametrize(
    "then",
    ["import keras", "keras_dist.Strategy", "from keras_dist import Strategy"],
)
@pytest.mark.parametrize("source", ["KERAS_BACKEND", "keras.json"])
def test_a_backend_that_keras_does_not_know(source, then, tmp_path):
    environment = {"KERAS_HOME": str(tmp_path), "KERAS_BACKEND": ""}
    if source == "keras.json":
        (tmp_path / source).write_text('{"backend": "caffe"}')
    else:
        environment["KERAS_BACKEND"] = "caffe"
    done = run_python(f"import keras_dist\n{then}", **environment)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    # A frame has a line more in Python 3.13.
    assert len(lines) <= 15, done.stderr
    last = lines[-1]
    assert last.startswith(
        "keras_dist.errors.BackendNotFoundError: Keras can't be imported with "
        "the backend 'caffe' ("
    )
    assert source in last
    assert keras.backend.backend() in last
    assert "set KERAS_BACKEND=" in last
