"""A docstring's first words say what a thing is or does."""

import ast
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
# A clause about a thing has to be decoded before the thing is known.
CLAUSES = {"What", "Which", "Whether", "Who", "Where", "Of", "How"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _docstrings(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED):
            text = ast.get_docstring(node)
            if text:
                name = getattr(node, "name", "the module")
                yield f"{path}:{node.body[0].lineno} {name}", text


def test_no_docstring_begins_with_a_clause():
    folders = [
        pathlib.Path(folder)
        for package in PACKAGES
        for folder in importlib.util.find_spec(
            package
        ).submodule_search_locations
    ]
    found = {
        where: text
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        for where, text in _docstrings(path)
    }
    assert len(found) > 2000
    clauses = [
        f"{where}: {text.splitlines()[0]}"
        for where, text in found.items()
        if text.split()[0] in CLAUSES
    ]
    assert not clauses, "\n".join(clauses)
