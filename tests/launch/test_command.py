"""`keras-dist` helps, completes, imports little, and ends by one Ctrl-C."""

import contextlib
import os
import pkgutil
import re
import signal
import subprocess
import sys
from importlib.metadata import version

import keras
import pytest
from typer.main import get_command
from typer.testing import CliRunner

import keras_dist
from keras_dist.bench import fit
from keras_dist.cli import main
from keras_dist.cli.jobs import demo
from keras_dist.cli.jobs import plan
from keras_dist.cli.trial import CommandTrial
from keras_dist.launch import job

BACKEND = keras.backend.backend()
ON_TORCH = pytest.mark.runs_on("torch")

# What starts the tests may ignore Ctrl-C, which is inherited.
COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from keras_dist.cli.main import app
app(prog_name="keras-dist")
"""

WAITING = """
import time

def make():
    print("it waits", flush=True)
    while True:
        # In pieces: Python forgets a signal that comes just before the call.
        time.sleep(0.05)
"""
# What a user runs where there may be no framework, or should not wait for it.
LIGHT = [
    *("--version", "explain devices", "plan --params 7B"),
    "plan --target list",
]
MODULES = [
    f"keras_dist.launch.{found.name}"
    for found in pkgutil.iter_modules([os.path.dirname(job.__file__)])
    if found.name not in ("__main__", "function")
]


@ON_TORCH
def test_what_needs_no_framework_imports_none():
    code = (
        "import importlib, sys\n"
        "from keras_dist.cli.main import app\n"
        f"for line in {LIGHT}:\n"
        "    assert not app(line.split(), standalone_mode=False)\n"
        f"for name in {MODULES}:\n"
        "    importlib.import_module(name)\n"
        "heavy = {'keras', 'numpy', 'jax', 'tensorflow', 'torch'}\n"
        "assert not heavy & set(sys.modules)\n"
        "import keras_dist\n"
        "keras_dist.list_devices()\n"
        "assert not any(n.startswith('keras_dist.bench') for n in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert first == f"keras-dist {version('keras-dist')}"
    assert re.fullmatch(r"keras-dist \d+\.\d+\S*", first)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("be", {"bench"}),
        ("bench --strategy cen", {"central"}),
        ("plan --strat", {"--strategy"}),
        ("plan --strategy one", {"one-device"}),
        (f"demo --backend {BACKEND[:2]}", {BACKEND}),
        (f"plan --backend {BACKEND[:2]}", {BACKEND}),
    ],
)
def test_a_shell_completes_what_is_typed(typed, offered):
    words = f"keras-dist {typed}"
    variables = {
        "_KERAS_DIST_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    result = CliRunner().invoke(
        main.app, [], env=variables, prog_name="keras-dist"
    )
    assert set(result.stdout.split()) == offered, result.output


def commands(group, *names):
    """The words of each command and group, from the application's own list."""
    yield names
    for name, each in getattr(group, "commands", {}).items():
        yield from commands(each, *names, name)


@ON_TORCH
def test_help_shows_no_type_for_a_flag(invoke):
    found = list(commands(get_command(main.app)))
    assert {("demo",), ("run",), ("bench",)} < set(found)
    for names in found:
        result = invoke(" ".join([*names, "--help"]))
        assert result.exit_code == 0, result.output
        assert "--help" in result.output
        assert "bool" not in result.output.lower()


@ON_TORCH
def test_help_shows_brackets_and_examples_as_they_are(invoke, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = invoke("plan --help").output
    assert '{".*up/kernel": [null, "logical"]}' in shown
    usage = invoke("run --help").output
    assert "keras-dist run [OPTIONS] SCRIPT [ARGS]... " in usage.replace(
        "keras-dist.py", "keras-dist"
    )
    name = keras_dist.MultiWorkerMirroredStrategy.__name__
    assert f"keras_dist.{name}()" in usage
    words = " ".join(usage.replace("│", " ").split())
    assert "the port after those is for the coordinator" in words
    # On a line of its own, to be copied.
    lines = [line.strip() for line in usage.splitlines()]
    assert "keras-dist run -n 4 train.py" in lines


@pytest.fixture(autouse=True)
def _ctrl_c_is_not_ignored():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def press_ctrl_c(*arguments):
    signal.raise_signal(signal.SIGINT)


def ignore_ctrl_c(*arguments):
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    return True


def fail_by_ctrl_c(*arguments):
    ignore_ctrl_c()
    raise RuntimeError("the runtime was interrupted")


@pytest.mark.parametrize(
    "pressed", [press_ctrl_c, ignore_ctrl_c, fail_by_ctrl_c]
)
@pytest.mark.parametrize(
    ("where", "name", "line"),
    [
        (fit, "run", "bench"),
        (demo, "run_demo", "demo"),
        (CommandTrial, "run", f"test --backend {BACKEND}"),
        (plan, "load_of_named", "plan --model users:make"),
    ],
)
def test_ctrl_c_ends_a_command_in_a_word(
    invoke, monkeypatch, where, name, line, pressed
):
    monkeypatch.setattr(where, name, pressed)
    result = invoke(line)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "Interrupted."
    assert "Traceback" not in result.output


def test_an_error_without_ctrl_c_is_an_error(invoke, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr(demo, "run_demo", fail)
    result = invoke("demo")
    assert isinstance(result.exception, RuntimeError)
    assert "Interrupted" not in result.output


def test_the_demo_stops_where_keras_ignores_ctrl_c(invoke, monkeypatch):
    """Keras ignores all that is raised while it reads a batch's logs."""
    begun = []

    def begin(self, batch, logs=None):
        begun.append(batch)
        ignore_ctrl_c()

    monkeypatch.setattr(demo.TrainingProgress, "on_train_batch_begin", begin)
    result = invoke("demo --epochs 1")
    assert result.exit_code == 130
    assert begun == [0]
    assert not result.stdout
    assert result.stderr.splitlines()[-1] == "Interrupted."


def test_ctrl_c_does_not_wait_for_the_users_function(tmp_path):
    (tmp_path / "users.py").write_text(WAITING)
    arguments = ["plan", "--model", "users:make", "--backend", BACKEND]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        env=os.environ | {"KERAS_BACKEND": ""},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "it waits\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "Interrupted."
    assert "Traceback" not in stderr
