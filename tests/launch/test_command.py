"""The `keras-dist` command itself: its version, and how Ctrl-C ends it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version

import keras
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from keras_dist.bench import fit
from keras_dist.cli import main
from keras_dist.cli.environment import CPU_ONLY
from keras_dist.cli.jobs import demo
from keras_dist.cli.jobs import plan
from keras_dist.cli.trial import CommandTrial

BACKEND = keras.backend.backend()

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


def test_the_version_is_that_of_the_package():
    result = CliRunner().invoke(main.app, ["--version"])
    assert result.exit_code == 0, result.output
    assert result.output == f"keras-dist {version('keras-dist')}\n"


def test_the_version_takes_no_framework():
    code = (
        "import sys\n"
        "from keras_dist.cli.main import app\n"
        "app(['--version'], standalone_mode=False)\n"
        "heavy = {'keras', 'numpy', 'jax', 'tensorflow', 'torch'}\n"
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert re.fullmatch(r"keras-dist \d+\.\d+\S*\n", finished.stdout)


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
    done = subprocess.run(
        [sys.executable, "-c", COMMAND],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ
        | {
            "_KERAS_DIST_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        },
    )
    assert set(done.stdout.split()) == offered, done.stderr


def test_the_completion_is_shown_for_the_shell_that_is_named():
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "--show-completion", "bash"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "complete -o default" in done.stdout
    assert "_KERAS_DIST_COMPLETE=complete_bash" in done.stdout


def commands(group, *names):
    """The words of each command and group, from the application's own list."""
    yield names
    for name, each in getattr(group, "commands", {}).items():
        yield from commands(each, *names, name)


COMMANDS = list(commands(get_command(main.app)))


def test_all_commands_are_found():
    assert {("demo",), ("run",), ("bench",)} < set(COMMANDS)


@pytest.mark.runs_on("torch")
@pytest.mark.parametrize("names", COMMANDS, ids="-".join)
def test_help_shows_no_type_for_a_flag(invoke, names):
    result = invoke(*names, "--help")
    assert result.exit_code == 0, result.output
    assert "--help" in result.output
    assert "bool" not in result.output.lower()


@pytest.mark.runs_on("torch")
def test_help_shows_brackets_as_they_are(invoke, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = invoke("plan", "--help").output
    assert '{".*up/kernel": [null, "logical"]}' in shown
    usage = invoke("run", "--help").output
    assert "keras-dist run [OPTIONS] SCRIPT [ARGS]... " in usage.replace(
        "keras-dist.py", "keras-dist"
    )


@pytest.fixture
def invoke(monkeypatch):
    """Runs a command in this process, where Ctrl-C is not ignored."""
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)
    monkeypatch.setenv("KERAS_DIST_VIRTUAL_DEVICES", "4")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda *arguments: CliRunner().invoke(main.app, arguments)
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
    ("where", "name", "arguments"),
    [
        (fit, "run", ("bench",)),
        (demo, "run_demo", ("demo",)),
        (CommandTrial, "run", ("test", "--backend", BACKEND)),
        (plan, "load_of_named", ("plan", "--model", "users:make")),
    ],
)
def test_ctrl_c_ends_a_command_in_a_word(
    invoke, monkeypatch, where, name, arguments, pressed
):
    monkeypatch.setattr(where, name, pressed)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for variable in CPU_ONLY:
        monkeypatch.setenv(variable, "")  # what commands set is set back
    result = invoke(*arguments)
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
    result = invoke("demo", "--epochs", "1")
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
