"""The walks of CONTRIBUTING: what they name is there, and they are short."""

import ast
import pathlib
import re

import pytest

TOP = pathlib.Path(__file__).parents[2]
WALKS = {
    title: re.findall(r"`([\w.]+):([\w.]+)`", text)
    for title, text in re.findall(
        r"^### (One batch of .*)\n((?:(?!^#).*\n)+)",
        (TOP / "CONTRIBUTING.md").read_text(),
        re.MULTILINE,
    )
}


def _source(module):
    for folder in (TOP, TOP / "backends"):
        path = folder.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return file.read_text()
    raise AssertionError(f"There is no module {module}.")


def _has(body, names):
    """Returns whether definitions inside of each other have these names."""
    for node in body:
        if getattr(node, "name", None) == names[0]:
            return len(names) == 1 or _has(node.body, names[1:])
    return False


def test_there_is_one_for_each_backend():
    assert [title.rpartition(" ")[2] for title in WALKS] == [
        "TensorFlow",
        "PyTorch",
        "JAX",
        "JAX",
    ]


@pytest.mark.parametrize("title", WALKS)
def test_each_hop_is_a_function_of_ours(title):
    hops = WALKS[title]
    assert 7 <= len(hops) <= 20
    for module, name in hops:
        tree = ast.parse(_source(module))
        assert _has(tree.body, name.split(".")), f"{module} has no {name}."
