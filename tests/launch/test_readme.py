"""README's commands are what CI runs, and name what exists."""

import pathlib
import re
import tomllib

import keras
import numpy as np

import keras_dist

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


def test_the_replica_function_does_what_it_says(capsys):
    text = (ROOT / "README.md").read_text()
    (example,) = (
        block
        for block in re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
        if "replica_fn" in block
    )
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    names = {
        "keras": keras,
        "keras_dist": keras_dist,
        "np": np,
        "strategy": strategy,
    }
    exec(example, names)
    printed = re.findall(r"\d+\.\d*", capsys.readouterr().out)
    assert [round(float(number), 4) for number in printed[:2]] == [16.0, 0.0]
    assert float(names["seen"].result()) == np.float32(16 / 22)


def test_the_training_loop_does_what_it_says():
    text = (ROOT / "README.md").read_text()
    (example,) = (
        block
        for block in re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
        if "train_step" in block
    )
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    rng = np.random.default_rng(0)
    names = {
        "keras": keras,
        "keras_dist": keras_dist,
        "strategy": strategy,
        "x": rng.normal(size=(210, 64)).astype("float32"),
        "y": rng.integers(0, 10, 210),
    }
    exec(example, names)
    assert int(names["optimizer"].iterations) == 3
    assert 0 < float(names["loss"]) < 20
    assert int(names["accuracy"].count) == 210
