"""`keras_dist.launch(fn)` gives each worker's result, or raises the error.

The functions are local to their tests, and so sent by value.
"""

import doctest
import importlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
import types

import keras
import pytest

import keras_dist
from keras_dist.launch import coordinator
from keras_dist.launch import function
from keras_dist.launch import group

launch = keras_dist.launch

FIND_COORDINATOR = coordinator.find


@pytest.fixture(autouse=True)
def _private_folder(monkeypatch, tmp_path):
    """Nothing is left in the folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert not list(folder.iterdir())


@pytest.fixture(autouse=True)
def _no_coordinator(monkeypatch):
    # It would load the backend's framework for each of these small tests.
    monkeypatch.setattr(coordinator, "find", lambda backend: None)


def test_results_come_in_the_order_of_workers(capfd):
    def fn(a, b, c):
        import os
        import sys
        import time

        index = int(os.environ["KERAS_DIST_WORKER_INDEX"])
        time.sleep(0.2 * (2 - index))  # The first ends last.
        print("out", index)
        print("error", file=sys.stderr)
        return index, a, b, c

    found = launch(fn, (1, "x"), {"c": [2]}, workers=3)
    assert found == [(i, 1, "x", [2]) for i in range(3)]
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        f"[worker {i}] out {i}" for i in (0, 1, 2)
    ]
    assert sorted(err.splitlines()) == [
        f"[worker {i}] error" for i in (0, 1, 2)
    ]


def test_closures_classes_lambdas_and_modules_of_this_process(
    tmp_path, monkeypatch
):
    class Point:
        def __init__(self, x):
            self.x = x

    (tmp_path / "only_here.py").write_text("def f():\n  return __name__\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    points = [Point(3)]
    try:
        (found,) = launch(
            lambda: (Point(points[0].x + 1), only_here.f()), workers=1
        )
    finally:
        del sys.modules["only_here"]
    assert type(found[0]) is Point
    assert (found[0].x, found[1]) == (4, "only_here")


def test_what_workers_are_told(monkeypatch):
    def fn():
        import os
        import sys

        names = ("WORKERS", "RESTARTS", "VIRTUAL_DEVICES")
        told = [os.environ[f"KERAS_DIST_{name}"] for name in names]
        loaded = {"keras", "numpy"} & set(sys.modules)
        return told, os.environ["KERAS_BACKEND"], loaded

    one, other = launch(fn, devices=3)
    assert one == other
    (workers, restarts, devices), backend, loaded = one
    assert len(set(workers.split(","))) == 2
    assert (restarts, devices) == ("0", "3")
    assert backend == keras.backend.backend()
    assert not loaded
    monkeypatch.setenv("KERAS_DIST_VIRTUAL_DEVICES", "5")
    for told, backend, _ in launch(fn, backend="torch"):
        assert told[2] == "5"
        assert backend == "torch"


def test_output_where_only_text_is_taken(monkeypatch):
    """As in a notebook."""
    text = io.StringIO()
    monkeypatch.setattr(sys, "stdout", text)
    launch(lambda: print("grüße"), workers=1)
    assert text.getvalue() == "[worker 0] grüße\n"


def test_an_exception_is_raised_here():
    class OfMine(Exception):
        def __init__(self, code):
            super().__init__(f"code {code}")
            self.code = code

        def __reduce__(self):
            return type(self), (self.code,)

    def fn():
        import os
        import time

        if os.environ["KERAS_DIST_WORKER_INDEX"] == "1":
            try:
                {}["inner"]
            except KeyError as error:
                raise OfMine(5) from error
        time.sleep(1000)  # until it is ended

    with pytest.raises(OfMine, match="code 5") as caught:
        launch(fn, workers=3, timeout=400)
    assert caught.value.code == 5
    (note,) = caught.value.__notes__
    assert note.startswith("worker 1 raised this error:\nTraceback")
    assert "raise OfMine(5)" in note or "in fn" in note
    assert "KeyError: 'inner'" in note
    assert "launcher" not in note


@pytest.mark.parametrize("what", ["constructor", "content"])
def test_an_exception_that_can_not_be_pickled(what):
    class Difficult(Exception):
        def __init__(self, one, other):
            super().__init__("difficult")
            self.content = (i for i in ()) if what == "content" else None

    def fn():
        raise Difficult(1, 2)

    with pytest.raises(RuntimeError, match=r"(?s)worker 0.*difficult"):
        launch(fn, workers=1)


def test_a_result_that_can_not_be_pickled():
    with pytest.raises(TypeError, match="generator") as caught:
        launch(lambda: (i for i in ()), workers=1)
    assert "worker 0" in caught.value.__notes__[0]


def test_the_cause_comes_before_who_lost_a_peer(tmp_path, monkeypatch):
    monkeypatch.setattr(group, "SETTLING_TIME", 100.0)

    def fn(folder):
        import contextlib
        import os
        import time

        class WorkerLostError(RuntimeError):
            pass

        if os.environ["KERAS_DIST_WORKER_INDEX"] == "0":
            (folder / "part").write_text(str(os.getpid()))
            (folder / "part").rename(folder / "0")
            raise WorkerLostError("worker 1 is lost")
        while not (folder / "0").exists():
            time.sleep(0.01)
        # The launcher asks for the ends of its workers; then they are gone.
        with contextlib.suppress(ProcessLookupError):
            while True:
                os.kill(int((folder / "0").read_text()), 0)
                time.sleep(0.01)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        launch(fn, (tmp_path,))


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("sys.exit(0)", "exit status 0, but without a result"),
        ("sys.exit(4)", "exit status 4"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
    ],
)
def test_a_worker_that_leaves(end, message):
    def fn():
        import os
        import sys

        if os.environ["KERAS_DIST_WORKER_INDEX"] == "1":
            exec(end, {"os": os, "sys": sys})

    with pytest.raises(RuntimeError, match=f"(?s)worker 1.*{message}"):
        launch(fn)


def test_timeout(tmp_path, monkeypatch):
    def fn(folder):
        import os
        import time

        index = os.environ["KERAS_DIST_WORKER_INDEX"]
        (folder / f"{index}.part").write_text(str(os.getpid()))
        (folder / f"{index}.part").rename(folder / index)
        if index == "1":
            time.sleep(1000)  # until it is ended

    def is_late():
        if not all((tmp_path / name).exists() for name in ("0", "1")):
            return False
        try:
            os.kill(int((tmp_path / "0").read_text()), 0)
        except ProcessLookupError:
            return True
        return False

    # Time is over once one worker runs and the other has ended.
    clock = types.SimpleNamespace(
        monotonic=lambda: time.monotonic() + 1000 * is_late()
    )
    monkeypatch.setattr(group, "time", clock)
    with pytest.raises(TimeoutError, match=r"500\.5 seconds: worker 1\."):
        launch(fn, (tmp_path,), timeout=500.5)
    for name in ("0", "1"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)


def test_ctrl_c_ends_the_workers(tmp_path):
    """In a process of its own, whose Ctrl-C is not ours."""
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, signal, sys\n"
        "from keras_dist.launch.function import launch\n"
        "from keras_dist.launch import coordinator\n"
        "coordinator.find = lambda backend: None\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def fn(folder):\n"
        "    import os, time\n"
        "    index = os.environ['KERAS_DIST_WORKER_INDEX']\n"
        "    (folder / f'{index}.part').write_text(str(os.getpid()))\n"
        "    (folder / f'{index}.part').rename(folder / index)\n"
        "    time.sleep(1000)\n"
        "launch(fn, (pathlib.Path(__file__).parent,))\n"
    )
    process = subprocess.Popen(
        [sys.executable, script], stderr=subprocess.PIPE, text=True
    )
    files = [tmp_path / "0", tmp_path / "1"]
    try:
        while not all(file.exists() for file in files):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)  # Another process is awaited.
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_keras_dist_in_a_worker(monkeypatch):
    """All of it once: with Keras, and the coordinator if there is one."""

    def fn():
        import keras

        import keras_dist

        strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        return keras.backend.backend(), strategy.num_replicas_in_sync

    monkeypatch.setattr(coordinator, "find", FIND_COORDINATOR)
    found = launch(fn, workers=1, devices=2, timeout=400)
    assert found == [(keras.backend.backend(), 2)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"fn": "f"}, TypeError, "'f', which is a str"),
        ({"workers": 0}, ValueError, "`workers`.*Received: 0"),
        ({"workers": True}, ValueError, "`workers`.*Received: True"),
        ({"workers": 1.5}, ValueError, r"`workers`.*Received: 1\.5"),
        ({"devices": 0}, ValueError, "`devices`.*Received: 0"),
        ({"backend": "nosuch"}, ValueError, "nosuch.*jax, tensorflow, torch"),
        ({"start_method": "fork"}, ValueError, "(?s)'fork'.*threads.*'spawn'"),
        ({"start_method": "forkserver"}, ValueError, "'spawn'"),
        ({"start_method": "x"}, ValueError, "must be 'spawn'. Received: 'x'"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        launch(**{"fn": print, **arguments})


def test_the_package_is_the_function():
    """However the package of the same name was imported before."""
    importlib.import_module("keras_dist.launch")
    assert keras_dist.launch is function.launch


@pytest.mark.parametrize(
    "module", [function, importlib.import_module("keras_dist.launch")]
)
def test_examples(module):
    names = {"keras_dist": keras_dist}
    finder = doctest.DocTestFinder(exclude_empty=True, recurse=True)
    tests = [
        test
        for test in finder.find(module, extraglobs=names, module=module)
        if test.examples
    ]
    assert tests
    for test in tests:
        report = []
        result = doctest.DocTestRunner().run(test, out=report.append)
        assert not result.failed, "".join(report)
