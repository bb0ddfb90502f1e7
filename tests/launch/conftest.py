"""Runs `keras-dist` here, and `keras-dist run` on scripts without Keras.

The backends are two that a package in a temporary folder registers: one
without and one with a coordinator.
"""

import os
import re
import shlex
import subprocess
import sys
import textwrap
import time

import keras
import pytest
from typer.testing import CliRunner

from keras_dist.cli.environment import CPU_ONLY
from keras_dist.cli.main import app
from keras_dist.launch import group

# What starts the tests may ignore Ctrl-C, which is inherited.
COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from keras_dist.cli.main import app
app(prog_name="keras-dist")
"""

# What the scripts of the workers begin with.
PREAMBLE = """
import os, pathlib, signal, subprocess, sys, time
index = int(os.environ["KERAS_DIST_WORKER_INDEX"])
restarts = int(os.environ["KERAS_DIST_RESTARTS"])
here = pathlib.Path(__file__).parent

def mark(name, text=""):
    (here / "new").mkdir(exist_ok=True)
    unfinished = here / "new" / f"{name}-{index}"
    unfinished.write_text(str(text))
    unfinished.rename(here / f"{name}-{index}")

def await_mark(name):
    while not (here / name).exists():
        time.sleep(0.01)

def await_end(process_id):
    # The launcher asks for the ends of its workers; then they are gone.
    try:
        while True:
            os.kill(int(process_id), 0)
            time.sleep(0.01)
    except ProcessLookupError:
        pass

def sleep():
    while True:
        # In pieces: Python forgets a signal that comes just before the call.
        time.sleep(0.05)
"""

COORDINATOR = """
import os, pathlib, signal, sys, time

def serve(address, num_workers):
    folder = pathlib.Path(os.environ["TEST_FOLDER"])
    loaded = sorted({"keras", "numpy"} & set(sys.modules))
    print("serving", address, flush=True)
    with open(folder / "coordinator", "ab", buffering=0) as file:
        file.write(f"{address} {num_workers} {loaded}\\n".encode())
    with open(folder / "jobs", "a") as file:
        file.write(os.environ["KERAS_DIST_JOB"] + "\\n")
    if "TEST_COORDINATOR_FAILS" in os.environ:
        raise OSError("no port for the coordinator")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        time.sleep(0.05)
"""


@pytest.fixture
def invoke(monkeypatch):
    """Runs a line of `keras-dist` in this process; the result."""
    for name in CPU_ONLY:
        monkeypatch.setenv(name, "")  # what commands set is set back
    monkeypatch.setenv("KERAS_BACKEND", keras.backend.backend())
    monkeypatch.setenv("KERAS_DIST_VIRTUAL_DEVICES", "4")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    monkeypatch.setenv("COLUMNS", "80")
    # The models of `models_to_plan.py` are found.
    monkeypatch.setattr(sys, "path", [os.path.dirname(__file__), *sys.path])
    return lambda line: CliRunner().invoke(app, shlex.split(line))


@pytest.fixture
def refused(invoke):
    """Runs a line that ends with an error, and returns the message."""

    def run(line):
        result = invoke(line)
        assert result.exit_code == 2, result.output
        assert isinstance(result.exception, SystemExit)
        return " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())

    return run


def _until(condition, seconds=100):
    """What a condition gives once it holds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)  # Another process is awaited.
    return found


def _is_alive(process_id):
    """Whether a process runs; one that is dead but not reaped does not."""
    try:
        with open(f"/proc/{process_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def plugins(tmp_path_factory):
    """A folder with an installed package of two backends."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "plain_engine.py").touch()
    (folder / "served_engine.py").write_text(COORDINATOR)
    info = folder / "engines-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: engines\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        "[keras_dist.backends]\n"
        "plain_engine = plain_engine:Backend\n"
        "served_engine = served_engine:Backend\n"
        "[keras_dist.coordinators]\n"
        "served_engine = served_engine:serve\n"
    )
    return folder


class Launcher:
    """Writes scripts and runs `keras-dist run` on them."""

    until = staticmethod(_until)
    is_alive = staticmethod(_is_alive)

    def __init__(self, folder, plugins):
        self.folder = folder
        self.plugins = plugins
        self.started = []

    def environment(self, **variables):
        ours = ("KERAS_", "OMP_", "COLUMNS", "PYTHON")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        return {
            **kept,
            "COLUMNS": "80",
            "KERAS_BACKEND": "plain_engine",
            # These scripts have no strategy.
            "KERAS_DIST_INDEPENDENT": "1",
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(self.plugins), os.environ.get("PYTHONPATH")])
            ),
            "TEST_FOLDER": str(self.folder),
            **variables,
        }

    def script(self, body):
        path = self.folder / "train.py"
        path.write_text(PREAMBLE + textwrap.dedent(body))
        return str(path)

    def command(self, *arguments):
        return [sys.executable, "-c", COMMAND, "run", *map(str, arguments)]

    def run(self, *arguments, settling_time=None, **variables):
        """Runs the command in this process, which saves the time to start."""
        with pytest.MonkeyPatch.context() as patch:
            for name in list(os.environ):
                patch.delenv(name)
            for name, value in self.environment(**variables).items():
                patch.setenv(name, value)
            patch.syspath_prepend(self.plugins)
            patch.chdir(self.folder)
            if settling_time is not None:
                patch.setattr(group, "SETTLING_TIME", settling_time)
            words = ["run", *map(str, arguments)]
            result = CliRunner().invoke(app, words, prog_name="keras-dist")
        assert isinstance(result.exception, SystemExit | None), result.exception
        return subprocess.CompletedProcess(
            words, result.exit_code, result.stdout, result.stderr
        )

    def start(self, *arguments, variables=(), **streams):
        streams = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **streams,
        }
        process = subprocess.Popen(
            self.command(*arguments),
            env=self.environment(**dict(variables)),
            cwd=self.folder,
            text=True,
            **streams,
        )
        self.started.append(process)
        return process

    def marks(self, name, count):
        """The texts of `count` marks, once all are there."""
        paths = [self.folder / f"{name}-{i}" for i in range(count)]
        _until(lambda: all(path.exists() for path in paths))
        return [path.read_text() for path in paths]


@pytest.fixture
def launcher(tmp_path, plugins):
    it = Launcher(tmp_path, plugins)
    yield it
    for process in it.started:
        process.kill()
        process.communicate()
