"""Too old versions are refused, new ones warned of, and lost names named."""

import ast
import pathlib
import sys
from importlib.metadata import requires

import keras
import pytest
from packaging.requirements import Requirement

import keras_dist
from errors.helpers import run_python
from keras_dist.environment import versions
from keras_dist.internals.private_names import private

BACKEND = keras.backend.backend()
ROOT = pathlib.Path(__file__).parents[2]
ASKED = [
    "engine<3,>=2.1; extra == 'engine'",
    "engine>=2.1,<3; extra == 'all'",
    "keras<3.17,>=3.14",
    "numpy",
]


@pytest.fixture
def asked(monkeypatch):
    """What keras_dist asks pip for, in these tests."""
    monkeypatch.setattr(versions, "requires", lambda name: ASKED)
    monkeypatch.delenv(versions.ALLOW_VARIABLE, raising=False)
    versions.tested_versions.cache_clear()
    yield
    versions.tested_versions.cache_clear()


SUPPORT = {
    "too old": ["engine 2.0.9", "keras 3.13.2"],
    "tested": ["engine 2.1", "engine 2.14.0+cu130", "keras 3.16.0.dev20261124"],
    "untested": ["engine 3.0.0", "keras 3.17.0.dev0", "keras 4.0"],
    None: ["numpy 1.0", "another 1.0"],
}


@pytest.mark.runs_on("torch")
def test_what_is_known_of_a_version(asked):
    for support, packages in SUPPORT.items():
        for package in packages:
            assert versions.support_of(*package.split()) == support, package


@pytest.mark.runs_on("torch")
def test_one_that_is_too_old_is_refused_with_the_command_to_run(asked):
    with pytest.raises(
        keras_dist.UnsupportedBackendError,
        match=r"Received: engine 1\.0\. Expected: engine>=2\.1,<3\. "
        r"Do this: `pip install 'engine>=2\.1,<3'`\.",
    ):
        versions.check({"keras": "3.15.1", "engine": "1.0"})
    with pytest.raises(
        keras_dist.UnsupportedKerasError,
        match=r"Received: keras 3\.13\. .* `pip install 'keras>=3\.14,<3\.17'`",
    ):
        versions.check({"keras": "3.13", "engine": "4.0"})


@pytest.mark.runs_on("torch")
def test_one_warning_names_all_that_are_untested(asked, monkeypatch, recwarn):
    versions.check({"keras": "3.15.1", "engine": "2.9"})
    assert not recwarn.list
    versions.check({"keras": "4.0", "engine": "3.1"})
    (warning,) = recwarn.list
    text = str(warning.message)
    assert "Received: keras 4.0. Expected: keras>=3.14,<3.17. " in text
    assert "Received: engine 3.1. Expected: engine>=2.1,<3. " in text
    recwarn.clear()
    monkeypatch.setenv(versions.ALLOW_VARIABLE, "1")
    versions.check({"keras": "4.0", "engine": "3.1"})
    assert not recwarn.list


@pytest.mark.smoke
def test_versions_are_tested_and_those_that_pip_was_asked_for():
    asked = {Requirement(line).name for line in requires("keras-dist")}
    assert {"keras", "jax", "tensorflow", "torch"} <= asked
    for package, version in {
        "keras": keras.__version__,
        BACKEND: sys.modules[BACKEND].__version__,
    }.items():
        assert versions.support_of(package, version) == "tested"


PROGRAM = """
import keras
import {name}
{name}.__version__ = "{version}"
for _ in range(2):
    try:
        import keras_dist
    except ImportError as error:
        print(type(error).__name__, error)
    else:
        print("imported")
keras_dist.OneDeviceStrategy("cpu:0")
"""


@pytest.mark.parametrize("name", ["keras", BACKEND])
def test_an_old_version_is_refused_each_time(name):
    done = run_python(PROGRAM.format(name=name, version="0.1"))
    kind = "Keras" if name == "keras" else "Backend"
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith(f"Unsupported{kind}Error keras_dist needs a newer ")
    assert f"Received: {name} 0.1." in first


def test_keras_is_not_imported_with_a_version_that_is_too_old():
    done = run_python(
        "import keras_dist\n"
        "from keras_dist.environment import versions\n"
        'versions.requires = lambda name: ["keras>=99.0"]\n'
        "for _ in range(2):\n"
        "    try:\n"
        "        import keras\n"
        "    except keras_dist.UnsupportedKerasError:\n"
        '        print("refused")\n'
    )
    assert done.stdout.split() == ["refused"] * 2, done.stderr


@pytest.mark.parametrize("allowed", ["", "0", "1"])
def test_a_new_version_is_warned_of_once(allowed):
    program = PROGRAM.format(name=BACKEND, version="99.1")
    done = run_python(
        program, warnings="always", KERAS_DIST_ALLOW_UNTESTED=allowed
    )
    assert done.stdout.split() == ["imported"] * 2, done.stderr
    count = done.stderr.count(f"Received: {BACKEND} 99.1.")
    assert count == (0 if allowed == "1" else 1)


@pytest.mark.smoke
@pytest.mark.runs_on("jax", "tensorflow", "torch")
def test_a_private_name_that_is_gone_is_named():
    found = private("keras.src.gone.away", "keras.src.losses.loss")
    assert found is private("keras.src.losses.loss")
    for place, error in {
        "keras.src.gone.away": keras_dist.UnsupportedKerasError,
        "keras.src.backend.common.gone": keras_dist.UnsupportedKerasError,
        "keras.Model._gone": keras_dist.UnsupportedKerasError,
        f"{BACKEND}.gone": keras_dist.UnsupportedBackendError,
    }.items():
        with pytest.raises(error, match=f"does not have: {place}. Received"):
            private(place)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        private("no_such_package.name")


def test_without_a_private_name_nothing_half_works():
    done = run_python(
        "import keras\n"
        "for each in keras.Model.__mro__:\n"
        '    if "_symbolic_build" in vars(each):\n'
        "        del each._symbolic_build\n"
        "import keras_dist\n"
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("keras_dist.errors.UnsupportedKerasError: ")
    assert "does not have: keras.Model._symbolic_build. Received: " in last


@pytest.mark.runs_on("torch")
def test_private_modules_are_only_looked_up():
    """An `import` of one would fail with an error that is not ours."""
    found = {
        path.name
        for folder in ("keras_dist", "backends")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if any(map(_is_private, _imported(node)))
    }
    # What the coordinator needs, `check` of the same module has looked up.
    assert found <= {"runtime_internals.py"}


def _imported(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _is_private(name):
    package, *rest = name.split(".")
    if package not in ("jax", "jaxlib", "keras", "tensorflow", "torch"):
        return False
    return name.startswith(("keras.src.", "tensorflow.python.")) or any(
        each.startswith("_") for each in rest
    )
