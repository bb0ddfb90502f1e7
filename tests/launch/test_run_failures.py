"""If a worker fails, `keras-dist run` names it, ends all, and may restart."""

import textwrap
import time

import pytest

from keras_dist.launch.failures import Failure
from keras_dist.launch.failures import first
from keras_dist.launch.failures import last_lines

pytestmark = pytest.mark.runs_on("torch")


def told(text):
    """The launcher's own lines."""
    return [line for line in text.splitlines() if "keras-dist:" in line]


def test_all_end_with_zero_one_before_the_others(launcher):
    script = "index == 0 and await_mark('end-1')\nmark('end')"
    done = launcher.run("--workers", 2, launcher.script(script))
    assert done.returncode == 0
    assert len(told(done.stderr)) == 1


def test_a_failure_ends_all_and_is_shown_once(launcher):
    script = launcher.script(
        """
        mark("process", os.getpid())
        print("before", file=sys.stderr)
        if index == 0:
            await_mark("process-1")
            try:
                {}["inner"]
            except KeyError:
                raise ValueError("outer")
        sleep()
        """
    )
    done = launcher.run("--workers", 3, "--log-dir", "logs", script)
    assert done.returncode == 1
    assert "[worker 0] before\n" in done.stderr
    assert "[worker 0] Traceback" not in done.stderr
    report = done.stderr[done.stderr.index("keras-dist: worker") :]
    lines = report.splitlines()
    assert lines[0] == (
        "keras-dist: worker 0 failed first: it ended with exit status 1"
    )
    assert lines[1] == "  Traceback (most recent call last):"
    assert lines[-2] == "  ValueError: outer"
    assert "logs/worker-0.log" in lines[-1]
    for text in ("ValueError: outer\n", "KeyError: 'inner'\n"):
        assert done.stderr.count(text) == 1
    for process in (1, 2):
        mark = launcher.folder / f"process-{process}"
        assert not (mark.exists() and launcher.is_alive(int(mark.read_text())))


def test_a_traceback_of_a_worker_that_goes_on_is_shown(launcher):
    script = launcher.script(
        """
        import traceback
        try:
            raise ValueError("caught")
        except ValueError:
            traceback.print_exc()
        mark("told")
        print("it goes on", file=sys.stderr)
        sleep()
        """
    )
    process = launcher.start("--workers", 1, script)
    lines = iter(process.stderr.readline, "")
    told = [next(line for line in lines if ": caught" in line)]
    told.append(next(line for line in lines if "goes on" in line))
    assert told == [
        "[worker 0] ValueError: caught\n",
        "[worker 0] it goes on\n",
    ]
    assert process.poll() is None


@pytest.mark.parametrize(
    ("body", "status", "how"),
    [
        ("sys.exit(3)", 3, "exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL (9)"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "SIGSEGV (11)"),
    ],
)
def test_the_exit_status_is_the_failed_workers(launcher, body, status, how):
    script = launcher.script(f"if index: {body}\nsleep()")
    done = launcher.run("--workers", 2, script)
    assert done.returncode == status
    assert "worker 1 failed first" in done.stderr
    assert how in done.stderr
    assert "It wrote nothing to stderr" in done.stderr


@pytest.mark.parametrize("how", ["code", "error"])
def test_the_cause_is_shown_not_who_lost_a_peer(launcher, how):
    script = launcher.script(
        f"""
        mark("process", os.getpid())
        if index == 0:
            class WorkerLostError(RuntimeError):
                pass
            if {how!r} == "code":
                print("worker 1 is lost", file=sys.stderr)
                sys.exit(42)
            raise WorkerLostError("worker 1")
        await_mark("process-0")
        await_end((here / "process-0").read_text())
        if index == 2:
            print("me too", file=sys.stderr)
            sys.exit(42)
        await_mark("process-2")
        await_end((here / "process-2").read_text())
        raise ValueError("my own fault")
        """
    )
    done = launcher.run("--workers", 3, script, settling_time=100.0)
    assert done.returncode == 1
    assert "worker 1 failed first" in done.stderr
    assert "  ValueError: my own fault" in done.stderr
    # What was said since worker 0 ended was held back.
    report = done.stderr.index("worker 1 failed first")
    assert report < done.stderr.index("[worker 2] me too")


def test_who_failed_first():
    lost = Failure("a", 42, 1.0)
    late = Failure("b", 1, 3.0)
    later = Failure("c", 1, 4.0)
    killed = Failure("d", -9, 3.0)
    assert first([lost, late, later]) is late
    assert first([late, killed]) is killed
    assert first([lost]) is lost
    assert first([]) is None


def test_the_last_traceback():
    trace = "Traceback (most recent call last):\n  File x\n"
    cause = "\nThe above exception was the direct cause of the following "
    cause += "exception:\n\n"
    last = f"{trace}A: 1\n{cause}{trace}B: 2"
    assert last_lines(f"{trace}Old: 0\nnoise\n{last}\n") == last
    assert last_lines("x\n" * 50).splitlines() == ["x"] * 20
    assert last_lines("") == ""
    long = last_lines(trace + "  line\n" * 500 + "C: 3")
    assert long.startswith("Traceback") and long.endswith("C: 3")
    assert len(long.splitlines()) == 101
    lost = Failure("a", 1, stderr=f"{trace}keras_dist.WorkerLostError: x")
    assert lost.lost_a_peer
    assert not Failure("a", 1, stderr=f"{trace}ValueError").lost_a_peer


@pytest.mark.parametrize(
    "body",
    [
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); shown(); sleep()",
        "shown(); os.kill(os.getpid(), signal.SIGSTOP)",
    ],
    ids=["ignores SIGTERM", "is stopped"],
)
def test_a_worker_that_does_not_end_is_killed(launcher, body):
    script = "shown = lambda: mark('pid', os.getpid())\n"
    script += f"if index == 0:\n    {body}\n"
    script += 'await_mark("pid-0")\nsys.exit(42)'
    before = time.monotonic()
    done = launcher.run("--workers", 2, "--grace", 0.3, launcher.script(script))
    assert time.monotonic() - before > 0.3
    assert done.returncode == 42
    assert "exit status 42, which asks for a restart" in done.stderr
    assert not launcher.is_alive(int(launcher.marks("pid", 1)[0]))


RECORD = """
with open(here / f"record-{index}", "a") as file:
    workers = os.environ["KERAS_DIST_WORKERS"]
    file.write(f"{restarts} {workers}\\n")
"""


def records(launcher, index):
    lines = (launcher.folder / f"record-{index}").read_text().splitlines()
    return [line.split() for line in lines]


def test_all_are_started_again_on_new_ports(launcher):
    script = RECORD + "mark(f'n{restarts}')\nawait_mark(f'n{restarts}-0')\n"
    script += "if restarts < 2:\n  index and sys.exit(9)\n  sleep()"
    done = launcher.run(
        "--workers", 2, "--max-restarts", 3, launcher.script(script)
    )
    assert done.returncode == 0, done.stderr
    for index in range(2):
        assert [restarts for restarts, _ in records(launcher, index)] == [
            "0",
            "1",
            "2",
        ]
    ports = [workers for _, workers in records(launcher, 0)]
    assert ports == [workers for _, workers in records(launcher, 1)]
    for one, next_one in zip(ports, ports[1:], strict=False):
        assert not set(one.split(",")) & set(next_one.split(","))
    assert done.stderr.count("OMP_NUM_THREADS") == 1
    again = [x for x in told(done.stderr) if "starting all workers" in x]
    assert len(again) == 2
    assert "restart 2 of 3" in again[1]
    assert "worker 1 ended with exit status 9" in again[1]


def test_no_restart_is_left(launcher):
    script = RECORD + "sys.exit(6)"
    done = launcher.run(
        "--workers", 1, "--max-restarts", 2, launcher.script(script)
    )
    assert done.returncode == 6
    assert [n for n, _ in records(launcher, 0)] == ["0", "1", "2"]
    assert "no restart is left" in told(done.stderr)[-1]


def test_the_restart_code_of_all_is_a_restart(launcher):
    script = RECORD + "mark(f'n{restarts}')\nawait_mark(f'n{restarts}-0')\n"
    script += "await_mark(f'n{restarts}-1')\nsys.exit(0 if restarts else 42)"
    done = launcher.run(
        "--workers", 2, "--max-restarts", 1, launcher.script(script)
    )
    assert done.returncode == 0
    assert "exit status 42" in done.stderr
    assert len(records(launcher, 0)) == len(records(launcher, 1)) == 2


def test_a_signal_to_the_launcher_is_no_reason_for_a_restart(launcher):
    script = launcher.script(RECORD + "mark('on')\nsleep()")
    process = launcher.start("--workers", 2, "--max-restarts", 3, script)
    launcher.marks("on", 2)
    process.terminate()
    assert process.wait(timeout=100) == 143
    assert len(records(launcher, 0)) == 1


LOSES = """
if index == 0:
    mark("pid", os.getpid())
    await_mark("failed-1")
    print("keras_dist.errors.WorkerLostError: Worker 0 can't go on without "
          "the others: worker 1 at 127.0.0.1:9 is lost.", file=sys.stderr)
    sys.exit(42)
"""


def test_a_traceback_that_is_being_written_is_awaited(launcher):
    body = """
    sys.stderr.write("Traceback (most recent call last):\\n")
    sys.stderr.flush()
    await_mark("pid-0")
    mark("failed")
    await_end((here / "pid-0").read_text())
    sys.exit("ValueError: my own fault")
    """
    script = launcher.script(LOSES + textwrap.dedent(body))
    done = launcher.run("--workers", 2, script, settling_time=100.0)
    assert done.returncode == 1
    assert "worker 1 failed first: it ended with exit" in done.stderr
    assert "  ValueError: my own fault" in done.stderr


def test_the_lost_one_is_blamed_though_it_still_runs(launcher):
    """On TensorFlow, one that raised waits for the others before it ends."""
    body = """
    try:
        raise KeyError("its own")
    except KeyError:
        import traceback
        traceback.print_exc()
    sys.stderr.flush()
    mark("failed")
    sleep()
    """
    script = launcher.script(LOSES + textwrap.dedent(body))
    done = launcher.run("--workers", 2, script)
    assert done.returncode == 1
    assert "worker 1 failed first: it failed, and still ran" in done.stderr
    assert "  KeyError: 'its own'" in done.stderr
    assert "worker 0 failed first" not in done.stderr


def test_a_worker_that_does_not_answer_is_blamed(launcher):
    script = launcher.script(LOSES + "mark('failed')\nsleep()")
    done = launcher.run("--workers", 2, script)
    assert done.returncode == 42
    assert "worker 1 failed first: it did not answer" in done.stderr
    assert "worker 0 says:" in done.stderr
    assert "  keras_dist.errors.WorkerLostError: Worker 0" in done.stderr


def test_who_is_blamed():
    def lost(name, told):
        text = f"keras_dist.errors.WorkerLostError: {told}"
        return Failure(name, 42, stderr=text).blamed

    told = "Worker 0 can't go on: worker 0 and worker 2 at a:1 can't be reached"
    assert lost("worker 0", told) == "worker 2"
    assert lost("worker 1", "Not all workers joined.") is None
    assert Failure("worker 0", 1, stderr="worker 1 is fine").blamed is None
