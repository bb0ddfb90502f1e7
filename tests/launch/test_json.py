"""The option `--json [FILE]` is the same for each command."""

import json
import os
import subprocess
import sys

import keras
import pytest
from typer.main import get_command

from keras_dist.bench import fit
from keras_dist.bench.measure import AGAIN
from keras_dist.bench.measure import Measurement
from keras_dist.cli import info
from keras_dist.cli import trial
from keras_dist.cli.commands import OPTIONAL_FILE
from keras_dist.cli.main import app
from keras_dist.environment.packages import InstalledBackend

pytestmark = pytest.mark.runs_on("torch")

BACKEND = keras.backend.backend()

# Each command with an option that follows `--json`, and an item of its JSON.
COMMANDS = {
    "info": ("--timeout 50", "keras_dist"),
    "test": (f"--backend {BACKEND}", "results"),
    "plan": ("--params 1000", "plans"),
    "bench": ("--rounds 1", "command"),
}
TITLE = "A table of results"
each_command = pytest.mark.parametrize("command", COMMANDS)


def measure(*arguments):
    """Stands for a benchmark, in which others print."""
    print("printed by Python code")
    os.write(1, b"written by a compiler\n")
    times = {"Keras": [1.0], "mirrored": [2.0], AGAIN: [1.0]}
    losses, pairs = dict.fromkeys(times, 1.0), [("mirrored", "Keras")]
    return Measurement(
        TITLE, ["cpu:0"], 8, 1, times, losses, {}, pairs, "Keras"
    )


def try_nothing(self):
    """Stands for the trial of a backend, which has one row."""
    self._results.append(
        trial.RowResult(BACKEND, TITLE, trial.Status.PASSED, "fine")
    )


@pytest.fixture
def run(invoke, monkeypatch, tmp_path):
    """Runs a command that starts no processes and measures nothing."""
    absent = InstalledBackend("absent_engine", "absent_engine:Backend", False)
    monkeypatch.setattr(info, "backends", lambda: [absent])
    monkeypatch.setattr(trial.CommandTrial, "run", try_nothing)
    monkeypatch.setattr(fit, "run", measure)
    monkeypatch.chdir(tmp_path)

    def run_line(*words):
        result = invoke(" ".join(words))
        assert result.exit_code in (0, 1, 2), result.exception
        return result

    return run_line


def test_all_commands_with_json_are_here():
    found = {
        name
        for name, each in get_command(app).commands.items()
        if any("--json" in param.opts for param in each.params)
    }
    assert found == set(COMMANDS)


@each_command
@pytest.mark.parametrize("spelling", ["--json", "--json -"])
def test_without_a_file_json_is_all_that_is_printed(
    run, capfd, tmp_path, command, spelling
):
    options, item = COMMANDS[command]
    for ordered in ((options, spelling), (spelling, options)):
        result = run(command, *ordered)
        assert result.exit_code != 2, result.output
        assert item in json.loads(result.stdout)
        assert "written by a compiler" not in capfd.readouterr().out
        assert not list(tmp_path.iterdir())


@each_command
def test_with_a_file_results_are_shown_too(run, tmp_path, command):
    options, item = COMMANDS[command]
    shown = run(command, options)
    for spelling in ("--json=x.json", "--json x.json"):
        result = run(command, spelling, options)
        assert result.exit_code == shown.exit_code != 2, result.output
        assert result.stdout.splitlines()[0] == shown.stdout.splitlines()[0]
        assert not result.stdout.startswith("{")
        assert item in json.loads((tmp_path / "x.json").read_text())
        (tmp_path / "x.json").unlink()


@each_command
def test_bad_files_are_errors_and_help_says_that_it_may_be_left_out(
    run, command
):
    options, _ = COMMANDS[command]
    result = run(command, "--json no/such/x.json", options)
    assert result.exit_code == 2
    assert "--json no/such/x.json: there is no folder" in result.stderr
    assert run(command, "--json .", options).exit_code == 2
    # A second word is no file.
    assert run(command, "--json x.json y.json").exit_code == 2
    lines = run(command, "--help").output.splitlines()
    (line,) = (x for x in lines if "--json " in x)
    assert OPTIONAL_FILE in line


def test_json_as_the_value_of_another_option_is_not_taken(refused):
    assert "'--json=-'" in refused("plan --params --json")


def test_what_others_write_goes_to_standard_error(tmp_path):
    """A user's function prints, and so does a process that it starts."""
    (tmp_path / "users.py").write_text(
        "import subprocess, sys, keras\n"
        "def make():\n"
        "    print('by the function')\n"
        "    code = \"print('by a process')\"\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
        "    layers = [keras.Input((2,)), keras.layers.Dense(1)]\n"
        "    return keras.Sequential(layers)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "keras_dist.cli", "plan"]
        + ["--model", "users:make", "--json", "--backend", BACKEND],
        env=os.environ | {"KERAS_BACKEND": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "plans" in json.loads(done.stdout)
    assert "by the function" in done.stderr
    assert "by a process" in done.stderr
