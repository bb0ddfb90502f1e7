"""The source distribution and the wheel have all that is opened or imported."""

import os
import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest

# They are built without any framework.
pytestmark = pytest.mark.runs_on("torch")

TOP = pathlib.Path(__file__).parents[2]
PACKAGES = {
    "keras_dist": TOP / "keras_dist",
    **{
        f"keras_dist_{name}": TOP / "backends" / f"keras_dist_{name}"
        for name in ("jax", "tensorflow", "torch")
    },
}
# Files at the top that its readers and its tests open.
TOP_FILES = (
    *("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"),
    *("CITATION.cff", "SECURITY.md", "constraints.txt", "tox.ini"),
    *("pyproject.toml", ".ci/run"),
)
FACTS = """
import keras_dist
import keras_dist.plugins
from importlib.metadata import entry_points, version

print(keras_dist.__file__)
print(version("keras-dist"), keras_dist.__version__)
print(*sorted(entry_points(group="keras_dist.backends").names))
"""


def run(*arguments, **options):
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def build(target, source, folder):
    """Builds in this environment, so that nothing is downloaded."""
    command = ["-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    run(*command, cwd=source)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The unpacked source distribution."""
    archive = build("sdist", TOP, tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


@pytest.fixture(scope="module")
def installed(source, tmp_path_factory):
    """A folder that has the wheel made from the source distribution."""
    wheel = build("wheel", source, tmp_path_factory.mktemp("wheel"))
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


def files(folder):
    """Returns the paths in a folder, without what Python or tests write."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file()
        and path.suffix in (".py", ".pyi", ".toml", ".txt", ".ipynb", ".md")
        and not any(
            part.startswith((".", "__pycache__"))
            for part in path.relative_to(folder).parts
        )
    } - {"gpu.md"}


def test_the_source_has_what_its_readers_and_tests_open(source):
    for name in TOP_FILES:
        assert (source / name).read_bytes() == (TOP / name).read_bytes(), name
    for folder in ("keras_dist", "backends", "docs", "tests", "tutorials"):
        expected = files(TOP / folder)
        assert len(expected) > 10
        assert files(source / folder) == expected


def test_each_package_of_the_wheel_is_whole_and_typed(installed):
    for name, folder in PACKAGES.items():
        assert (installed / name / "py.typed").is_file(), name
        assert files(installed / name) == files(folder)
    assert not (installed / "tests").exists()
    (licenses,) = installed.glob("*.dist-info/licenses")
    assert (licenses / "LICENSE").read_text() == (TOP / "LICENSE").read_text()


def test_the_wheel_is_imported_with_its_plugins(installed):
    places = [str(installed), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, places))
    told = run("-c", FACTS, env=os.environ | {"PYTHONPATH": path})
    place, versions, plugins = told.splitlines()[-3:]
    assert place == str(installed / "keras_dist" / "__init__.py")
    assert len(set(versions.split())) == 1
    assert plugins == "jax tensorflow torch"


def test_links_of_the_page_on_pypi_lead_out_of_it(installed):
    (metadata,) = installed.glob("*.dist-info/METADATA")
    links = re.findall(r"\]\(([^)]+)\)", metadata.read_text())
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links), links
