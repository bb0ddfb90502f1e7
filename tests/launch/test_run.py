"""`keras-dist run`: what workers are told, output, options."""

import os
import pkgutil
import pty
import re
import shutil
import subprocess
import sys

import keras
import pytest
from typer.testing import CliRunner

import keras_dist
from keras_dist.cli.main import app
from keras_dist.cluster_resolver import slurm
from keras_dist.environment import machine
from keras_dist.launch import job
from keras_dist.launch.addresses import AddressLayout
from keras_dist.launch.job import Job
from keras_dist.launch.output import Screen

pytestmark = pytest.mark.runs_on("torch")

MODULES = [
    f"keras_dist.launch.{found.name}"
    for found in pkgutil.iter_modules([os.path.dirname(job.__file__)])
    if found.name not in ("__main__", "function")
]


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
        "KERAS_DIST_WORKERS",
        "KERAS_DIST_WORKER_INDEX",
        "KERAS_DIST_COORDINATOR",
        "KERAS_DIST_RESTARTS",
        "KERAS_DIST_VIRTUAL_DEVICES",
        "KERAS_BACKEND",
        "PYTHONUNBUFFERED",
        "TF_CPP_MIN_LOG_LEVEL",
        "TF_CONFIG",
        "RANK",
    ]
    done = launcher.run(
        *("--workers", 3, "--devices", 2),
        *(launcher.script(SHOW), *names),
        KERAS_DIST_COORDINATOR="of another job",
        KERAS_DIST_WORKER_INDEX="7",
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
            "PYTHONUNBUFFERED": "1",
            "TF_CPP_MIN_LOG_LEVEL": "0",
            "TF_CONFIG": "{}",
            "RANK": "5",
        }


def test_what_follows_the_script_is_the_scripts(launcher):
    script = launcher.script("print(sys.argv[1:])")
    arguments = ["--workers", "9", "-m", "--", "--help", ""]
    done = launcher.run("--workers", 1, script, *arguments)
    assert done.returncode == 0, done.stderr
    assert f"[worker 0] {arguments}" in done.stdout


def test_a_module(launcher):
    package = launcher.folder / "package"
    package.mkdir()
    (package / "part.py").write_text("import sys; print(sys.argv[1:])")
    done = launcher.run("--workers", 2, "-m", "package.part", "--help")
    assert done.returncode == 0, done.stderr
    assert "[worker 1] ['--help']" in done.stdout


def test_backend_option(launcher):
    script = launcher.script(SHOW)
    done = launcher.run(
        *("--workers", 1, "--backend", "plain_engine", script),
        "KERAS_BACKEND",
        KERAS_BACKEND="",
    )
    assert shown(done, 0) == {"KERAS_BACKEND": "plain_engine"}


def test_cores_are_shared_and_it_says_so_once(launcher, monkeypatch):
    script = launcher.script(SHOW)
    arguments = ("--workers", 2, "--max-restarts", 1)
    fails = "sys.exit(not restarts)"
    done = launcher.run(*arguments, script, "OMP_NUM_THREADS")
    expected = str(max(1, machine.num_cores() // 2))
    assert shown(done, 1) == {"OMP_NUM_THREADS": expected}
    done = launcher.run(*arguments, launcher.script(fails))
    assert done.stderr.count("OMP_NUM_THREADS") == 1


@pytest.mark.parametrize(("workers", "threads"), [(3, "3"), (16, "1")])
def test_how_cores_are_shared(monkeypatch, workers, threads):
    monkeypatch.setattr(machine, "num_cores", lambda: 11)
    given, notice = machine.with_threads({}, workers)
    assert given == {"OMP_NUM_THREADS": threads}
    assert f"OMP_NUM_THREADS={threads}" in notice


def test_threads_that_were_set_are_kept(launcher):
    script = launcher.script(SHOW)
    done = launcher.run(
        *("--workers", 2, script, "OMP_NUM_THREADS"), OMP_NUM_THREADS="5"
    )
    assert shown(done, 1) == {"OMP_NUM_THREADS": "5"}
    assert "OMP_NUM_THREADS" not in done.stderr


@pytest.mark.parametrize(
    ("workers", "visible", "expected"),
    [
        (2, "0,1,2,3", ["0,1", "2,3"]),
        (2, "4,GPU-a, 7,-1,2", ["4", "GPU-a"]),
        (2, "5", ["5", "5"]),
        (1, "0,1", ["0,1"]),
    ],
)
def test_gpus_are_shared(launcher, workers, visible, expected):
    done = launcher.run(
        *("--workers", workers, launcher.script(SHOW), "CUDA_VISIBLE_DEVICES"),
        CUDA_VISIBLE_DEVICES=visible,
    )
    assert [
        shown(done, index)["CUDA_VISIBLE_DEVICES"] for index in range(workers)
    ] == expected


def test_gpus_that_nvidia_smi_lists(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: A'\necho 'GPU 1: A'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert machine.gpus({}) == ["0", "1"]


def test_gpus_are_listed_once(tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho called >> {calls}\necho 'GPU 0: A'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    made = Job(("true",), AddressLayout(3, (), 0), keras.backend.backend(), {})
    screen = Screen(sys.stdout, sys.stderr)
    for restarts in range(2):
        made.group(made.layout.addresses(), restarts, screen, print)
    assert calls.read_text().splitlines() == ["called"]


def _never_ends(command, timeout, **options):
    raise subprocess.TimeoutExpired(command, timeout)


@pytest.mark.parametrize("count", [machine.gpus, slurm.count_gpus])
def test_a_list_of_gpus_that_never_ends_is_an_error(monkeypatch, count):
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", _never_ends)
    with pytest.raises(
        RuntimeError, match=r"within 60 seconds(?s:.*)CUDA_VISIBLE_DEVICES"
    ):
        count({})


def test_run_says_that_gpus_are_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", _never_ends)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    script = tmp_path / "script.py"
    script.touch()
    done = CliRunner().invoke(app, ["run", "--workers", "2", str(script)])
    assert done.exit_code == 2, done.output
    assert "It is unknown which GPUs" in " ".join(done.output.split())


def test_one_worker_keeps_all_cores(launcher):
    done = launcher.run("--workers", 1, launcher.script(SHOW), "OMP_X")
    assert done.stderr == ""


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


def test_a_line_is_shown_when_it_is_written(launcher):
    process = launcher.start(
        "--workers", 1, launcher.script("print('here')\nsleep()")
    )
    assert process.stdout.readline() == "[worker 0] here\n"


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


def test_a_reader_that_leaves_does_not_end_training(launcher):
    process = launcher.start(
        *("--workers", 1),
        launcher.script("print('a')\nawait_mark('go')\nprint('b')\nmark('x')"),
    )
    process.stdout.readline()
    process.stdout.close()
    (launcher.folder / "go").touch()
    assert process.wait(timeout=100) == 0
    assert launcher.marks("x", 1)


@pytest.fixture
def invoke(launcher, monkeypatch):
    """Runs the command in this process: the result, and its text unboxed."""
    launcher.script("raise AssertionError('started')")
    monkeypatch.chdir(launcher.folder)
    monkeypatch.syspath_prepend(launcher.plugins)
    monkeypatch.setenv("KERAS_BACKEND", "plain_engine")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        result = CliRunner().invoke(app, ["run", *map(str, arguments)])
        text = re.sub("[│╭╮╰╯─]", " ", result.output)
        return result, " ".join(text.split())

    return run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--workers", 0, "train.py"], "'--workers'"),
        (["train.py"], "'--workers'"),
        (["--workers", 1], "SCRIPT"),
        (["--workers", 1, "--nosuch", 1, "train.py"], "--nosuch"),
        (["--workers", 1, "nosuch.py"], "no 'nosuch.py' in"),
        (["--workers", 2, "--hosts", "a:1,b:1", "train.py"], "--host-index"),
        (["--workers", 2, "--host-index", 1, "train.py"], "--hosts"),
        (["--workers", 2, "--backend", "nosuch", "train.py"], "'nosuch'"),
        (["--workers", 2, "--max-restarts", -1, "train.py"], "max-restarts"),
        (["--workers", 2, "--log-dir", "train.py", "train.py"], "log-dir"),
        (["--workers", 2, "--log-dir", "train.py/x", "train.py"], "log-dir"),
        *(
            (["--workers", n, "--hosts", h, "--host-index", i, "train.py"], e)
            for n, h, i, e in [
                (3, "a:1,b:1", 0, "multiple of the number of hosts"),
                (2, "a:1,b:1", 2, "from 0 to 1"),
                (2, "a:1,b:1", -1, "from 0 to 1"),
                (2, "a,b:1", 0, "host 'a'"),
                (2, "a:1,", 0, "host ''"),
                (2, "fd00::1:9,b:1", 0, "host 'fd00::1:9'"),
                (2, "a:70000,b:1", 0, "host 'a:70000'"),
                (2, "a:65535,b:1", 0, "65535"),
                (4, "a:9000,a:9002", 0, "a:9002"),
            ]
        ),
    ],
)
def test_bad_options(invoke, arguments, expected):
    result, output = invoke(*arguments)
    assert result.exit_code == 2
    assert expected in output
    assert isinstance(result.exception, SystemExit)


def test_help_names_the_strategy_and_shows_an_example(invoke):
    result, output = invoke("--help")
    assert result.exit_code == 0
    name = keras_dist.MultiWorkerMirroredStrategy.__name__
    assert f"keras_dist.{name}()" in output
    # On a line of its own, to be copied.
    lines = [line.strip() for line in result.output.splitlines()]
    assert "keras-dist run -n 4 train.py" in lines


def test_n_is_short_for_workers(launcher):
    script = launcher.script("""
        workers = os.environ["KERAS_DIST_WORKERS"].split(",")
        print(len(workers), *sys.argv[1:])
    """)
    done = launcher.run("-n", 2, script, "-n", 3)
    assert done.returncode == 0, done.stderr
    # What follows the script is the script's.
    expected = [f"[worker {i}] 2 -n 3" for i in range(2)]
    assert sorted(done.stdout.splitlines()) == expected


def test_help_says_where_the_coordinator_listens(invoke):
    result, output = invoke("--help")
    assert result.exit_code == 0
    assert "the port after those is for the coordinator" in output


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


def test_the_launcher_imports_no_keras():
    code = "import importlib, sys\n" + "".join(
        f"importlib.import_module({name!r})\n" for name in MODULES
    )
    code += "print(sorted({'keras', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    assert done.stdout == "[]\n"
