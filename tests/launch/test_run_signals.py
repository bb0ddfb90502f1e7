"""`keras-dist run` passes signals on, and leaves no process behind."""

import os
import signal
import subprocess
import sys

import pytest

from keras_dist.launch import orphans

pytestmark = pytest.mark.runs_on("torch")

HANDLES = """
def handler(number, frame):
    with open(here / f"got-{index}", "a") as file:
        file.write(f"{number}\\n")
    sys.exit(0)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, handler)
mark("on", os.getpid())
sleep()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_reach_each_worker_once(launcher, name):
    number = getattr(signal, name)
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(
            "Whoever started the tests has it ignored (nohup does), and so "
            "the launcher ignores it too."
        )
    script = launcher.script(HANDLES)
    process = launcher.start("--workers", 2, script)
    launcher.marks("on", 2)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 128 + number
    for index in range(2):
        got = (launcher.folder / f"got-{index}").read_text()
        assert got == f"{int(number)}\n"
    assert "failed" not in stderr


def test_ctrl_c_ends_with_one_line(launcher):
    """Workers are out of the terminal's reach: the launcher tells them."""
    script = launcher.script(
        """
        signal.signal(signal.SIGINT, signal.default_int_handler)
        mark("session", os.getsid(0))
        try:
            sleep()
        finally:
            index or print("saved", file=sys.stderr)
        """
    )
    process = launcher.start(
        "--workers", 2, script, variables={"OMP_NUM_THREADS": "1"}
    )
    sessions = launcher.marks("session", 2)
    assert len({str(os.getsid(0)), *sessions}) == 3
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "[worker 0] saved\n" in stderr
    assert stderr.endswith("keras-dist: interrupted\n")
    assert stderr.count("keras-dist:") == 1


STUBBORN = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: mark("told"))
mark("on", os.getpid())
sleep()
"""


@pytest.mark.parametrize(
    ("grace", "number"), [(1000, signal.SIGINT), (0.3, signal.SIGTERM)]
)
def test_a_second_ctrl_c_or_the_end_of_the_grace_time_kills(
    launcher, grace, number
):
    script = launcher.script(STUBBORN)
    process = launcher.start("--workers", 2, "--grace", grace, script)
    workers = launcher.marks("on", 2)
    process.send_signal(number)
    if number == signal.SIGINT:
        launcher.marks("told", 2)
        process.send_signal(number)
    assert process.wait(timeout=100) == 128 + number
    assert not any(launcher.is_alive(int(worker)) for worker in workers)


GRANDCHILD = """
child = subprocess.Popen(["/bin/sh", "-c", "trap '' TERM; sleep 120 & wait"])
mark("child", child.pid)
await_mark("child-0")
await_mark("child-1")
"""


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "sleep()"])
def test_what_a_worker_started_ends_with_it(launcher, end):
    body = GRANDCHILD + f"if index: {end}\nelse: "
    script = launcher.script(body + ("pass" if end == "pass" else "sleep()"))
    process = launcher.start("--workers", 2, "--grace", 0.3, script)
    children = launcher.marks("child", 2)
    if end == "sleep()":
        process.send_signal(signal.SIGTERM)
    status = {"pass": 0, "sys.exit(3)": 3, "sleep()": 143}[end]
    assert process.wait(timeout=100) == status
    assert not any(launcher.is_alive(int(child)) for child in children)


def test_what_a_worker_started_may_end_by_itself(launcher):
    script = launcher.script(
        """
        on, told = here / "on-1", here / "told-1"
        subprocess.Popen(["/bin/sh", "-c",
            f"trap 'echo > {told}; exit' TERM; echo > {on};"
            "while true; do sleep 0.05; done"])
        await_mark("on-1")
        """
    )
    process = launcher.start("--workers", 1, "--grace", 1000, script)
    assert process.wait(timeout=100) == 0
    assert (launcher.folder / "told-1").exists()


def test_a_killed_launcher_leaves_nobody(launcher):
    script = launcher.script(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "input()"],
            stdin=subprocess.PIPE)
        stubborn = subprocess.Popen(["/bin/sh", "-c", "trap '' TERM; "
            "sleep 120 & wait"])
        mark("processes", f"{os.getpid()} {child.pid} {stubborn.pid}")
        sleep()
        """
    )
    process = launcher.start(
        *("--workers", 2, "--backend", "served_engine", script)
    )
    processes = " ".join(launcher.marks("processes", 2)).split()
    parents = _children_of(process.pid)
    assert len(parents) == 4  # Two workers, the coordinator, the watcher.
    process.kill()
    launcher.until(
        lambda: (
            not any(launcher.is_alive(int(p)) for p in [*processes, *parents])
        )
    )


def test_workers_end_with_a_killed_launcher_and_no_watcher(launcher):
    """Killed before it, for instance because memory ran out."""
    script = launcher.script("mark('on', os.getpid())\nsleep()")
    process = launcher.start("--workers", 2, script)
    workers = [int(text) for text in launcher.marks("on", 2)]
    others = {int(p) for p in _children_of(process.pid)} - {*workers}
    (watcher,) = others
    os.kill(watcher, signal.SIGKILL)
    process.kill()
    launcher.until(lambda: not any(map(launcher.is_alive, workers)))


def _children_of(process_id):
    path = f"/proc/{process_id}/task/{process_id}/children"
    with open(path) as file:
        return file.read().split()


def test_the_guard_does_not_start_for_a_dead_parent():
    done = subprocess.run(
        [*orphans.PROGRAM, "1", sys.executable, "-c", "print(1)"],
        capture_output=True,
        timeout=100,
    )
    assert done.returncode == 1
    assert done.stdout == b""
