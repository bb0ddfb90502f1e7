"""README's commands are what CI runs, and name what exists."""

import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).parents[2]


def commands():
    """The single-line shell commands of README, in order."""
    text = (ROOT / "README.md").read_text()
    return re.findall(r"```bash\n(.*)\n```", text)


def test_there_are_two_single_line_commands():
    assert len(commands()) == 2


def test_ci_runs_the_test_command():
    assert commands()[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_demo_command_uses_extras_and_a_script_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'"\.\[(.*?)\]"', commands()[0])
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert "keras-dist" in project["scripts"]
