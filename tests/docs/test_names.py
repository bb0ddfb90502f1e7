"""No two classes of the product have one name, private ones included."""

import ast
import collections
import importlib.util
import pathlib

import pytest

pytestmark = pytest.mark.runs_on("torch")

PACKAGES = (
    "keras_dist",
    "keras_dist_jax",
    "keras_dist_tensorflow",
    "keras_dist_torch",
)
# The older strategies have the names of the newer ones, as in tf.distribute.
TWICE = pathlib.Path("keras_dist", "compat", "v1.py")


def _folder(package):
    (folder,) = importlib.util.find_spec(package).submodule_search_locations
    return pathlib.Path(folder)


def test_each_class_has_a_name_of_its_own():
    places = collections.defaultdict(list)
    for folder in map(_folder, PACKAGES):
        for path in sorted(folder.rglob("*.py")):
            place = path.relative_to(folder.parent)
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and place != TWICE:
                    places[node.name].append(f"{place}:{node.lineno}")
    assert len(places) > 300
    repeated = {name: at for name, at in places.items() if len(at) > 1}
    assert not repeated
