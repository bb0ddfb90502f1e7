"""A backend imports what another distribution's backend could import."""

import ast
import pathlib

import keras
import pytest

import keras_dist
from keras_dist import plugins
from keras_dist import testing

BACKENDS = pathlib.Path(__file__).parents[2] / "backends"
OFFERED = ("keras_dist.plugins.", "keras_dist.errors.")


def imported(source):
    """The modules that a source imports, also inside of functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide where they go"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def not_offered(source):
    """The modules of the front end that a source must not import."""
    return [
        name
        for name in imported(source)
        if name.split(".")[0] == "keras_dist" and not name.startswith(OFFERED)
    ]


@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
def test_a_backend_imports_what_is_offered(backend):
    found = {}
    for path in sorted((BACKENDS / f"keras_dist_{backend}").rglob("*.py")):
        names = not_offered(path.read_text())
        if names:
            found[path.name] = names
    assert not found, f"Expected: only names of {OFFERED}."


@pytest.mark.parametrize(
    "line",
    [
        "import keras_dist",
        "from keras_dist import fit",
        "from keras_dist.fit.steps import STEPS",
        "from keras_dist import plugins",
        "from keras_dist.core.plan import Plan",
        "def f():\n    import keras_dist.strategies.strategy",
    ],
)
def test_other_imports_are_found(line):
    assert not_offered(line)


def test_each_name_is_used_and_there():
    used = {
        name.removeprefix("keras_dist.plugins.")
        for path in BACKENDS.rglob("*.py")
        for name in imported(path.read_text())
        if name.startswith("keras_dist.plugins.")
    }
    assert set(dir(plugins)) == used | set(plugins.__all__)
    for name in dir(plugins):
        assert getattr(plugins, name) is not None, name


def test_the_fourth_backend_needs_stable_names_only():
    path = pathlib.Path(__file__).parents[1] / "conformance" / "fourth.py"
    names = {
        name
        for name in imported(path.read_text())
        if name.startswith("keras_dist")
    }
    assert names
    stable = {f"keras_dist.plugins.{name}" for name in plugins.__all__}
    public = {f"keras_dist.testing.{name}" for name in testing.__all__}
    assert names <= stable | public


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="the backend is on PyTorch"
)
def test_a_backend_that_compiles_nothing_says_so():
    from conformance.fourth import FourthBackend

    with plugins.override_backend(FourthBackend()):
        strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        function = keras_dist.function(lambda: 1)
        for replica_function in (function, lambda: function()):
            with pytest.raises(keras_dist.UnsupportedModelError):
                strategy.run(replica_function)
