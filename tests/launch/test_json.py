"""The option `--json [FILE]`, which is the same for each command."""

import json
import os
import subprocess
import sys

import keras
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from keras_dist.bench import fit
from keras_dist.bench.measure import AGAIN
from keras_dist.bench.measure import Measurement
from keras_dist.cli import info
from keras_dist.cli import trial
from keras_dist.cli.commands import OPTIONAL_FILE
from keras_dist.cli.environment import CPU_ONLY
from keras_dist.cli.main import app
from keras_dist.environment.packages import InstalledBackend

pytestmark = pytest.mark.runs_on("torch")

BACKEND = keras.backend.backend()

# Each command with an option that follows `--json`, and an item of its JSON.
COMMANDS = {
    ("info",): (("--timeout", "50"), "keras_dist"),
    ("test",): (("--backend", BACKEND), "results"),
    ("plan",): (("--params", "1000"), "plans"),
    ("bench",): (("--rounds", "1"), "command"),
}
TITLE = "A table of results"


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
def invoke(monkeypatch, tmp_path):
    """Runs a command that starts no processes and measures nothing."""
    for name in (*CPU_ONLY, "KERAS_DIST_VIRTUAL_DEVICES"):
        monkeypatch.setenv(name, "")  # what commands set is set back
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    monkeypatch.setenv("COLUMNS", "80")
    absent = InstalledBackend("absent_engine", "absent_engine:Backend", "")
    monkeypatch.setattr(info, "backends", lambda: [absent])
    monkeypatch.setattr(trial.CommandTrial, "run", try_nothing)
    monkeypatch.setattr(fit, "run", measure)
    monkeypatch.chdir(tmp_path)

    def run(command, *arguments):
        result = CliRunner().invoke(app, [*command, *arguments])
        assert result.exit_code in (0, 1, 2), result.exception
        return result

    return run


def test_all_commands_with_json_are_here():
    def found(group, *names):
        for name, each in getattr(group, "commands", {}).items():
            if any("--json" in param.opts for param in each.params):
                yield (*names, name)
            yield from found(each, *names, name)

    assert set(found(get_command(app))) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("spelling", [("--json",), ("--json", "-")])
@pytest.mark.parametrize("is_last", [False, True])
def test_without_a_file_json_is_all_that_is_printed(
    invoke, capfd, tmp_path, command, spelling, is_last
):
    options, item = COMMANDS[command]
    ordered = (options, spelling) if is_last else (spelling, options)
    result = invoke(command, *(arg for part in ordered for arg in part))
    assert result.exit_code != 2, result.output
    assert item in json.loads(result.stdout)
    assert "written by a compiler" not in capfd.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("is_one", [False, True])
def test_with_a_file_results_are_shown_too(invoke, tmp_path, command, is_one):
    options, item = COMMANDS[command]
    shown = invoke(command, *options)
    spelling = ["--json=x.json"] if is_one else ["--json", "x.json"]
    result = invoke(command, *spelling, *options)
    assert result.exit_code == shown.exit_code != 2, result.output
    assert result.stdout.splitlines()[0] == shown.stdout.splitlines()[0]
    assert not result.stdout.startswith("{")
    assert item in json.loads((tmp_path / "x.json").read_text())


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_bad_files_are_errors(invoke, command):
    options, _ = COMMANDS[command]
    result = invoke(command, "--json", "no/such/x.json", *options)
    assert result.exit_code == 2
    assert "--json no/such/x.json: there is no folder" in result.stderr
    assert invoke(command, "--json", ".", *options).exit_code == 2
    # A second word is no file.
    assert invoke(command, "--json", "x.json", "y.json").exit_code == 2


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_says_that_the_file_may_be_left_out(invoke, command):
    result = invoke(command, "--help")
    (line,) = (x for x in result.output.splitlines() if "--json " in x)
    assert OPTIONAL_FILE in line


def test_json_as_the_value_of_another_option_is_not_taken(invoke):
    result = invoke(("plan",), "--params", "--json")
    assert result.exit_code == 2
    assert "'--json=-'" in result.stderr


def test_options_of_a_script_stay_the_scripts(launcher):
    script = launcher.script("print(sys.argv[1:])")
    done = launcher.run("-n", 1, script, "--json", "--verbose")
    assert done.stdout == "[worker 0] ['--json', '--verbose']\n", done.stderr


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
