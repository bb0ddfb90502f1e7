"""The page about Ray has the programs that `tests/launchers` runs."""

import pathlib
import re

import pytest

pytestmark = pytest.mark.runs_on("torch")

TOP = pathlib.Path(__file__).parents[2]
GUIDE = TOP / "docs" / "pages" / "guide"
PROGRAMS = TOP / "tests" / "launchers" / "programs"
BLOCK = re.compile(
    r"Save this as `(\w+\.py)`:\n\n```python\n(.*?)```", re.DOTALL
)


def test_the_programs_are_those_that_are_run():
    page = (GUIDE / "ray.md").read_text()
    blocks = dict(BLOCK.findall(page))
    assert len(blocks) == page.count("```python") == 6
    for name, text in blocks.items():
        assert text == (PROGRAMS / name).read_text(), name
    tests = (PROGRAMS.parent / "test_ray.py").read_text()
    assert all(f'"{name}"' in tests for name in blocks if name != "digits.py")


def test_the_programs_of_the_table_are_there():
    page = (GUIDE / "launchers_tried.md").read_text()
    named = set(re.findall(r"`[^`]*?(\w+\.py)`", page))
    assert named >= {"digits.py", "ray_lost_actor.py", "ray_twice.py"}
    assert all((PROGRAMS / name).exists() for name in named)
