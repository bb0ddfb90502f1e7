"""`keras-dist demo`, as a user runs it."""

import os
import re
import subprocess
import sys
from importlib.metadata import version

import keras
import pytest
from typer.testing import CliRunner

from keras_dist.cli import environment
from keras_dist.cli.jobs import demo
from keras_dist.cli.main import app
from keras_dist.core.context import has_strategy
from keras_dist.environment import packages

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
    for each in (environment, packages):
        monkeypatch.setattr(
            each,
            "find_spec",
            lambda name: None if name in modules else find_spec(name),
        )


@pytest.mark.smoke
def test_it_passes_and_shows_what_it_did(finished):
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = finished.stdout.splitlines()
    assert lines[0] == "PASS the same weights as one device"
    assert "FAIL" not in finished.stdout
    assert max(map(len, lines)) <= 80
    backend = keras.backend.backend()
    for shown in (
        "Compared with one device +same: ",
        rf"Backend +{backend} {re.escape(version(backend))}",
        rf"Keras +{re.escape(keras.__version__)}",
        r"Devices +cpu:0 cpu:1 cpu:2\b",
        r"Replicas +3\b",
        "Global batch +100 rows",
        "Per-replica batch +at most 34 rows",
        "Last global batch +7 rows",
        r"training +weight +5 .* same\b",
        r"digits/hidden/kernel .* mirrored +cpu:0-2\b",
        # 2,442 parameters of 4 bytes: 2 (3 - 1) / 3 of them from each of 3.
        r"gradients, all-reduce +devices +cpu:0-2 +13.0 kB +39.1 kB",
    ):
        assert re.search(shown, finished.stdout), shown
    (accuracy,) = re.findall(r"Test accuracy +([\d.]+)", finished.stdout)
    assert float(accuracy) > 0.5


def test_standard_error_has_what_it_does_and_no_logs(finished):
    first, *lines = finished.stderr.splitlines()
    assert first == (
        "keras-dist demo: trains a small net on 3 virtual replicas, and "
        "compares with one device. With the default of 5 epochs, it takes up "
        "to a minute."
    )
    text = "\n".join(lines)
    losses = re.findall(r"on replicas, epoch \d: .*loss ([\d.]+)", text)
    assert len(losses) == len([line for line in lines if line]) == 2
    assert float(losses[1]) < float(losses[0])


def test_tables_and_epochs_are_for_verbose():
    quiet = run_demo("--replicas", "2", "--epochs", "1")
    assert quiet.returncode == 0, quiet.stdout + quiet.stderr
    assert quiet.stdout.startswith("PASS")
    assert re.search(r"Per-replica batch +50 rows", quiet.stdout)
    assert "hidden" not in quiet.stdout
    assert len(quiet.stdout.splitlines()) < 15
    assert "epoch 1" not in quiet.stdout + quiet.stderr


@pytest.mark.parametrize(
    ("name", "value", "is_plain"),
    [("momentum", 0.5, False), ("learning_rate", float("nan"), True)],
)
def test_other_numbers_and_no_numbers_are_a_fail(
    monkeypatch, capsys, name, value, is_plain
):
    build = demo.digits.model

    def spoiled():
        model = build()
        if is_plain or has_strategy():
            setattr(model.optimizer, name, value)
        return model

    monkeypatch.setattr(demo.digits, "model", spoiled)
    monkeypatch.setattr(demo, "set_virtual_devices", lambda count: None)
    assert not demo.run_demo(2, 1, lambda: None, sys.stderr, False)
    assert capsys.readouterr().out.startswith("FAIL different numbers")


@pytest.mark.parametrize(("same", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_is_the_verdict(invoke, monkeypatch, same, code):
    monkeypatch.setattr(demo, "run_demo", lambda *arguments: same)
    assert invoke("demo").exit_code == code


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help(invoke, arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert "demo" in result.output


@pytest.mark.parametrize(
    ("arguments", "variable", "hidden", "told"),
    [
        (("--replicas", "0"), "torch", (), ["--replicas"]),
        (("--epochs", "0"), "torch", (), ["--epochs"]),
        (
            ("--backend", "nosuch"),
            "torch",
            (),
            ["'nosuch'", "--backend", "jax, tensorflow, torch"],
        ),
        ((), "nosuch", (), ["KERAS_BACKEND"]),
        (("--backend", "jax"), "torch", ("jax",), ["keras-dist[jax]"]),
        ((), "", ("jax", "tensorflow", "torch"), ["keras-dist[jax]"]),
        ((), "torch", ("sklearn",), ["keras-dist[demo]"]),
    ],
)
def test_what_can_not_run_ends_with_2_and_a_fix(
    invoke, monkeypatch, arguments, variable, hidden, told
):
    monkeypatch.setenv("KERAS_BACKEND", variable)
    hide(monkeypatch, *hidden)
    result = invoke("demo", *arguments)
    assert result.exit_code == 2
    for text in told:
        assert text in result.output


def test_without_a_choice_the_first_installed_is_taken(invoke, monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND")
    monkeypatch.setattr(
        packages, "find_spec", lambda name: name != "jax" or None
    )
    assert environment.select_backend(None) == "tensorflow"
    assert os.environ["KERAS_BACKEND"] == "tensorflow"


def test_the_command_line_itself_imports_no_keras():
    code = "import sys, keras_dist.cli.main; sys.exit('keras' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
