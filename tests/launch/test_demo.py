"""`keras-dist demo`, as a user runs it."""

import os
import re
import subprocess
import sys
from importlib.metadata import version

import keras
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from keras_dist.cli import environment
from keras_dist.cli.jobs import demo
from keras_dist.cli.main import app

pytestmark = pytest.mark.runs_on("torch")


def run_command(*arguments, **variables):
    """Runs `keras-dist`, without this process' virtual devices."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != "KERAS_DIST_VIRTUAL_DEVICES"
    }
    return subprocess.run(
        [sys.executable, "-m", "keras_dist.cli", *arguments],
        env=inherited | {"COLUMNS": "80"} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_demo(*arguments):
    chosen = ("--backend", keras.backend.backend())
    return run_command("demo", *chosen, *arguments, KERAS_BACKEND="")


@pytest.fixture(scope="module")
def finished():
    return run_demo("--replicas", "3", "--epochs", "2", "--verbose")


@pytest.fixture
def invoke(monkeypatch):
    """Runs the command in this process, for what needs a changed world."""
    monkeypatch.setenv("KERAS_BACKEND", keras.backend.backend())
    monkeypatch.setenv("KERAS_DIST_VIRTUAL_DEVICES", "4")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    return lambda *arguments: CliRunner().invoke(app, arguments)


def hide(monkeypatch, *modules):
    """Makes the command believe that modules are not installed."""
    find_spec = environment.find_spec
    monkeypatch.setattr(
        environment,
        "find_spec",
        lambda name: None if name in modules else find_spec(name),
    )


@pytest.mark.smoke
def test_it_passes(finished):
    assert finished.returncode == 0, finished.stdout + finished.stderr
    verdict = finished.stdout.splitlines()[0]
    assert verdict == "PASS the same weights as one device"
    assert "FAIL" not in finished.stdout


def test_tables_and_epochs_are_for_verbose():
    quiet = run_demo("--replicas", "2", "--epochs", "1")
    assert quiet.returncode == 0, quiet.stdout + quiet.stderr
    assert quiet.stdout.startswith("PASS")
    assert re.search(r"Replicas +2\b", quiet.stdout)
    assert "Test accuracy" in quiet.stdout
    assert "conv_1" not in quiet.stdout
    assert len(quiet.stdout.splitlines()) < 15
    assert "epoch 1" not in quiet.stdout + quiet.stderr


def test_no_framework_logs_on_standard_error(finished):
    _, *lines = finished.stderr.splitlines()
    assert not [line for line in lines if line and line[:3] != "on "]


def test_without_a_terminal_the_first_line_says_what_it_does(finished):
    assert finished.stderr.splitlines()[0] == (
        "keras-dist demo: trains a small net on 3 virtual replicas, and again "
        "on one device. With the default of 5 epochs, it takes up to a minute."
    )


def test_it_names_backend_and_versions(finished):
    backend = keras.backend.backend()
    assert re.search(
        rf"Backend +{backend} {re.escape(version(backend))}", finished.stdout
    )
    assert re.search(rf"Keras +{keras.__version__}", finished.stdout)


def test_it_shows_devices_and_batches(finished):
    assert re.search(r"Devices +cpu:0 cpu:1 cpu:2\b", finished.stdout)
    assert re.search(r"Replicas +3\b", finished.stdout)
    assert re.search(r"Global batch +100 rows", finished.stdout)
    assert re.search(r"Per-replica batch +at most 34 rows", finished.stdout)
    assert re.search(r"Last global batch +7 rows", finished.stdout)


@pytest.mark.parametrize(
    "variable",
    ["net/conv_1/kernel", "net/norm/moving_mean", "sgd/iteration"],
)
def test_it_shows_where_a_variable_lives(finished, variable):
    (row,) = re.findall(rf".*\b{variable}\b.*", finished.stdout)
    assert re.findall(r"cpu:\S+", row) == ["cpu:0-2"]
    assert "mirrored" in row


def test_it_shows_what_a_step_sends(finished):
    # 9,946 parameters of 4 bytes: 2 (3 - 1) / 3 of them from each of 3.
    row = r"gradients, all-reduce +devices +cpu:0-2 +53.0 kB +159.1 kB"
    assert re.search(row, finished.stdout)


def test_it_shows_progress_of_both_trainings(finished):
    for where in ("on replicas", "on one device"):
        losses = re.findall(
            rf"{where}, epoch \d: .*loss ([\d.]+)", finished.stderr
        )
        assert len(losses) == 2
        assert float(losses[1]) < float(losses[0])


def test_weights_and_accuracy_are_those_of_one_device(finished):
    (difference,) = re.findall(
        r"Largest difference in weights +(\S+)", finished.stdout
    )
    assert 0 <= float(difference) <= demo.TOLERANCE
    several, one = re.findall(r"Test accuracy on .* ([\d.]+)", finished.stdout)
    assert several == one
    assert float(several) > 0.5


def test_it_fits_a_terminal(finished):
    assert max(map(len, finished.stdout.splitlines())) <= 80


@pytest.mark.parametrize("changed", [1e-3, np.nan])
def test_other_weights_are_a_fail(changed):
    console = Console(record=True, quiet=False)
    digits = demo.Digits.load()
    model, other = demo.build_model(), demo.build_model()
    weights = other.get_weights()
    weights[-1][0] += changed
    other.set_weights(weights)
    assert not demo.show_verdict(console, digits, model, other)
    assert console.export_text().startswith("FAIL different weights")


@pytest.mark.parametrize(("same", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_is_the_verdict(invoke, monkeypatch, same, code):
    monkeypatch.setattr(demo, "run_demo", lambda *arguments: same)
    assert invoke("demo").exit_code == code


@pytest.mark.parametrize(
    ("rows", "replicas", "expected"),
    [(100, 4, "25 rows"), (7, 2, "at most 4 rows"), (1, 3, "at most 1 rows")],
)
def test_per_replica(rows, replicas, expected):
    assert demo.per_replica(rows, replicas) == expected


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help(invoke, arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert "demo" in result.output


@pytest.mark.parametrize("option", ["--replicas", "--epochs"])
def test_less_than_one_is_an_error(invoke, option):
    result = invoke("demo", option, "0")
    assert result.exit_code == 2
    assert option in result.output


def test_an_unknown_backend_is_an_error_naming_ours(invoke):
    result = invoke("demo", "--backend", "nosuch")
    assert result.exit_code == 2
    for text in ("'nosuch'", "--backend", "jax, tensorflow, torch"):
        assert text in result.output


def test_an_unknown_backend_in_the_environment(invoke, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "nosuch")
    result = invoke("demo")
    assert result.exit_code == 2
    assert "KERAS_BACKEND" in result.output


@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
def test_an_absent_framework_is_an_error_naming_its_extra(
    invoke, monkeypatch, backend
):
    hide(monkeypatch, backend)
    result = invoke("demo", "--backend", backend)
    assert result.exit_code == 2
    assert f"keras-dist[{backend}]" in result.output


def test_no_framework_at_all_is_an_error(invoke, monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND")
    hide(monkeypatch, "jax", "tensorflow", "torch")
    result = invoke("demo")
    assert result.exit_code == 2
    assert "keras-dist[jax]" in result.output


def test_without_a_choice_the_first_installed_is_taken(invoke, monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND")
    monkeypatch.setattr(
        environment, "find_spec", lambda name: name != "jax" or None
    )
    assert environment.select_backend(None) == "tensorflow"
    assert os.environ["KERAS_BACKEND"] == "tensorflow"


def test_absent_scikit_learn_is_an_error_naming_its_extra(invoke, monkeypatch):
    hide(monkeypatch, "sklearn")
    result = invoke("demo")
    assert result.exit_code == 2
    assert "keras-dist[demo]" in result.output


def test_the_command_line_itself_imports_no_keras():
    code = "import sys, keras_dist.cli.main; sys.exit('keras' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
