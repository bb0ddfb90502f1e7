"""`keras-dist run` tells workers who they are, and shows what they write."""

import os
import pty
import re
import shutil
import subprocess
import sys

import keras
import pytest

from keras_dist.cluster_resolver import slurm
from keras_dist.environment import machine
from keras_dist.launch.addresses import AddressLayout
from keras_dist.launch.job import Job
from keras_dist.launch.output import Screen

pytestmark = pytest.mark.runs_on("torch")

SHOW = """
for name in sys.argv[1:]:
    print(name, os.environ.get(name))
"""


def shown(done, worker):
    """What `SHOW` printed on a worker."""
    pairs = re.findall(rf"\[worker {worker}\] (\w+) (.*)", done.stdout)
    return dict(pairs)


def test_what_each_worker_is_told(launcher):
    names = [
        *("KERAS_DIST_WORKERS", "KERAS_DIST_WORKER_INDEX"),
        *("KERAS_DIST_COORDINATOR", "KERAS_DIST_RESTARTS"),
        *("KERAS_DIST_VIRTUAL_DEVICES", "KERAS_BACKEND", "PYTHONUNBUFFERED"),
        *("TF_CPP_MIN_LOG_LEVEL", "TF_CONFIG", "RANK", "OMP_NUM_THREADS"),
    ]
    done = launcher.run(
        *("--workers", 3, "--devices", 2, "--backend", "plain_engine"),
        *(launcher.script(SHOW), *names),
        KERAS_DIST_COORDINATOR="of another job",
        KERAS_DIST_WORKER_INDEX="7",
        KERAS_BACKEND="",
        TF_CONFIG="{}",
        RANK="5",
        TF_CPP_MIN_LOG_LEVEL="0",
    )
    assert done.returncode == 0, done.stderr
    for index in range(3):
        seen = shown(done, index)
        workers = seen.pop("KERAS_DIST_WORKERS").split(",")
        assert len(set(workers)) == 3
        assert all(re.fullmatch(r"127\.0\.0\.1:\d+", w) for w in workers)
        assert seen == {
            "KERAS_DIST_WORKER_INDEX": str(index),
            "KERAS_DIST_COORDINATOR": "None",
            "KERAS_DIST_RESTARTS": "0",
            "KERAS_DIST_VIRTUAL_DEVICES": "2",
            "KERAS_BACKEND": "plain_engine",
            "OMP_NUM_THREADS": str(max(1, machine.num_cores() // 3)),
            "PYTHONUNBUFFERED": "1",
            "TF_CPP_MIN_LOG_LEVEL": "0",
            "TF_CONFIG": "{}",
            "RANK": "5",
        }


def test_what_follows_the_script_is_the_scripts(launcher):
    script = launcher.script("""
        workers = os.environ["KERAS_DIST_WORKERS"].split(",")
        print(len(workers), sys.argv[1:])
    """)
    given = ["-n", "3", "--workers", "9", "-m", "--", "--help", "--json", ""]
    done = launcher.run("-n", 2, script, *given)
    assert done.returncode == 0, done.stderr
    expected = [f"[worker {i}] 2 {given}" for i in range(2)]
    assert sorted(done.stdout.splitlines()) == expected


def test_a_module(launcher):
    package = launcher.folder / "package"
    package.mkdir()
    (package / "part.py").write_text("import sys; print(sys.argv[1:])")
    done = launcher.run("--workers", 1, "-m", "package.part", "--help")
    assert done.returncode == 0
    assert "[worker 0] ['--help']" in done.stdout
    assert done.stderr == ""  # one worker keeps all cores


def test_how_cores_and_gpus_are_shared(monkeypatch):
    monkeypatch.setattr(machine, "num_cores", lambda: 11)
    for workers, threads in ((3, "3"), (16, "1")):
        given, notice = machine.with_threads({}, workers)
        assert given == {"OMP_NUM_THREADS": threads}
        assert f"OMP_NUM_THREADS={threads}" in notice
    gpus = machine.gpus({"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert machine.share(gpus, 1, 2) == ["2", "3"]
    assert machine.share(gpus, 0, 1) == gpus


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("4,GPU-a, 7,-1,2", ["4", "GPU-a"]), ("5", ["5", "5"])],
)
def test_gpus_are_shared_and_threads_that_were_set_are_kept(
    launcher, visible, expected
):
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    done = launcher.run(
        *("--workers", 2, launcher.script(SHOW), *names),
        CUDA_VISIBLE_DEVICES=visible,
        OMP_NUM_THREADS="5",
    )
    for index, gpus in enumerate(expected):
        assert shown(done, index) == dict(zip(names, (gpus, "5"), strict=True))
    assert "OMP_NUM_THREADS" not in done.stderr


def test_gpus_that_nvidia_smi_lists_are_listed_once(tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    program = tmp_path / "nvidia-smi"
    lines = "echo 'GPU 0: A'\necho 'GPU 1: A'\n"
    program.write_text(f"#!/bin/sh\necho called >> {calls}\n{lines}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert machine.gpus({}) == ["0", "1"]
    calls.unlink()
    made = Job(("true",), AddressLayout(3, (), 0), keras.backend.backend(), {})
    screen = Screen(sys.stdout, sys.stderr)
    for restarts in range(2):
        made.group(made.layout.addresses(), restarts, screen, print)
    assert calls.read_text().splitlines() == ["called"]


def _never_ends(command, timeout, **options):
    raise subprocess.TimeoutExpired(command, timeout)


def test_a_list_of_gpus_that_never_ends_is_an_error(
    refused, tmp_path, monkeypatch
):
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", _never_ends)
    for count in (machine.gpus, slurm.count_gpus):
        with pytest.raises(
            RuntimeError,
            match=r"(?s)within 60 seconds(?s:.*)CUDA_VISIBLE_DEVICES",
        ):
            count({})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    script = tmp_path / "script.py"
    script.touch()
    assert "It is unknown which GPUs" in refused(f"run --workers 2 {script}")


def test_lines_have_the_workers_name(launcher):
    done = launcher.run(
        *("--workers", 2),
        launcher.script(
            """
            print(f"out {index}\\n\\nlast", end="")
            print(f"error {index}", file=sys.stderr)
            """
        ),
    )
    assert sorted(done.stdout.splitlines()) == sorted(
        f"[worker {i}] {text}"
        for i in range(2)
        for text in (f"out {i}", "", "last")
    )
    for i in range(2):
        assert f"[worker {i}] error {i}\n" in done.stderr


def test_much_output_arrives_whole(launcher):
    done = launcher.run(
        *("--workers", 2, "--log-dir", "logs"),
        launcher.script("print('x' * 3_000_000)\nprint('y\\n' * 100_000)"),
    )
    log = (launcher.folder / "logs" / "worker-1.log").read_text()
    assert log == "x" * 3_000_000 + "\n" + "y\n" * 100_000 + "\n"
    assert done.stdout.count("x") == 3_000_000
    assert done.stdout.count("[worker 0] y\n") == 100_000


def test_log_files(launcher):
    done = launcher.run(
        *("--workers", 2, "--log-dir", "logs/run", "--max-restarts", 1),
        launcher.script(
            """
            print(f"out {index} {restarts}")
            print(f"error {index} {restarts}", file=sys.stderr)
            mark(f"written{restarts}")
            await_mark(f"written{restarts}-{1 - index}")
            sys.exit(7 if not restarts else 0)
            """
        ),
    )
    assert done.returncode == 0, done.stderr
    logs = launcher.folder / "logs" / "run"
    assert sorted(path.name for path in logs.iterdir()) == [
        "worker-0.log",
        "worker-0.restart-1.log",
        "worker-1.log",
        "worker-1.restart-1.log",
    ]
    for name, text in [("worker-1", "1 0"), ("worker-1.restart-1", "1 1")]:
        assert set((logs / f"{name}.log").read_text().splitlines()) == {
            f"out {text}",
            f"error {text}",
        }
    assert "[worker 0] out 0 0" in done.stdout
    assert "[worker 0] error 0 1" in done.stderr
    assert "[worker 1]" not in done.stdout + done.stderr


def on_terminal(process_of, answers=None, **variables):
    """What a launcher shows on a terminal.

    `answers` maps a text to the file to make once the text is shown.
    """
    answers = dict(answers or {})
    ours, theirs = pty.openpty()
    try:
        process = process_of(stdout=theirs, stderr=theirs, variables=variables)
        os.close(theirs)
        shown = b""
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # Linux' end of a terminal.
                break
            if not data:
                break
            shown += data
            for text in [text for text in answers if text in shown]:
                answers.pop(text).touch()
        process.wait(timeout=100)
    finally:
        os.close(ours)
    # A terminal makes two of each end of a line.
    return shown.replace(b"\r\n", b"\n")


def test_a_terminal_gets_the_chiefs_bytes(launcher):
    script = launcher.script(
        """
        if index == 0:
            for i in range(3):
                print(f"\\r{i}/3", end="", flush=True)
            await_mark("hello-shown")
            print("\\r3/3", flush=True)
        else:
            await_mark("bar-shown")
            print("hello")
        """
    )
    shown = on_terminal(
        lambda **options: launcher.start("--workers", 2, script, **options),
        answers={
            b"2/3": launcher.folder / "bar-shown",
            b"hello": launcher.folder / "hello-shown",
        },
        OMP_NUM_THREADS="1",
    )
    # While nothing is there yet, a line that takes itself away.
    waiting, shown = shown.split(b"\r0/3")
    assert b"Starting 2 workers" in waiting
    assert waiting.count(b"\n") == waiting.count(b"\x1b[1A")
    assert shown == (b"\r1/3\r2/3\n\x1b[2m[worker 1] \x1b[0mhello\n\r3/3\n")


def test_no_colour_where_none_is_wanted(launcher):
    script = launcher.script("index and print('hello')")
    shown = on_terminal(
        lambda **options: launcher.start("--workers", 2, script, **options),
        OMP_NUM_THREADS="1",
        NO_COLOR="1",
    )
    assert shown.endswith(b"[worker 1] hello\n")
    assert b"\x1b[2m" not in shown


def test_lines_are_shown_at_once_and_a_reader_may_leave(launcher):
    process = launcher.start(
        *("--workers", 1),
        launcher.script("print('a')\nawait_mark('go')\nprint('b')\nmark('x')"),
    )
    assert process.stdout.readline() == "[worker 0] a\n"
    process.stdout.close()
    (launcher.folder / "go").touch()
    assert process.wait(timeout=100) == 0
    assert launcher.marks("x", 1)


@pytest.mark.runs_on("jax", "tensorflow", "torch")
def test_the_module_is_the_command(launcher):
    """Once more for `python -m keras_dist.launch`, which loads Keras first."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "keras_dist.launch", "--workers", "1"),
            *(launcher.script("print(sys.argv[1:])"), "--help"),
        ],
        # The real backend: Keras has to be imported.
        env=launcher.environment(KERAS_BACKEND=keras.backend.backend()),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[worker 0] ['--help']\n"
