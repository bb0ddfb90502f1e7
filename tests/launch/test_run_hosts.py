"""`keras-dist run` starts one job on several hosts, with its coordinator."""

import importlib.util
import os
import socket

import own_ports
import pytest

from keras_dist.launch import addresses
from ports import free_block
from runs.runs import RUNS

pytestmark = pytest.mark.runs_on("torch")


def test_two_hosts(launcher):
    port = free_block(6)
    hosts = f"127.0.0.1:{port},localhost:{port + 3}"
    script = launcher.script(
        """
        import socket
        address = os.environ["KERAS_DIST_WORKERS"].split(",")[index]
        host, port = address.split(":")
        with socket.create_server((host, int(port))):
            mark("told", "{KERAS_DIST_WORKERS} {KERAS_DIST_COORDINATOR} "
                "{KERAS_DIST_JOB}".format(**os.environ))
            for i in range(4):
                await_mark(f"told-{i}")
            await_mark("coordinator")
            while not (here / "coordinator").read_text():
                time.sleep(0.01)
        print("met")
        """
    )
    launchers = [
        launcher.start(
            *("--workers", 4, "--hosts", hosts, "--host-index", index),
            *("--backend", "served_engine", script),
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=100) for process in launchers]
    assert [process.returncode for process in launchers] == [0, 0], outputs
    assert (
        launcher.marks("told", 4)
        == [
            f"127.0.0.1:{port},127.0.0.1:{port + 1},"
            f"localhost:{port + 3},localhost:{port + 4} 127.0.0.1:{port + 2} "
            f"keras-dist run on 127.0.0.1:{port}, localhost:{port + 3}"
        ]
        * 4
    )
    for index, (stdout, _) in enumerate(outputs):
        for worker in range(2):
            assert f"[worker {2 * index + worker}] met" in stdout
    # One coordinator, on the first host.
    served = (launcher.folder / "coordinator").read_text().splitlines()
    assert served == [f"127.0.0.1:{port + 2} 4 []"]


def test_free_addresses_differ_and_are_free():
    found = addresses.free_addresses(50)
    assert len(set(found)) == 50
    # No outgoing connection gets one before a worker listens.
    assert all(20000 <= int(x.rpartition(":")[2]) < 32768 for x in found)
    again = addresses.free_addresses(50, avoid=found)
    assert not set(found) & set(again)
    for address in found[:3]:
        host, port = address.split(":")
        socket.create_server((host, int(port))).close()


def test_runs_of_the_tests_have_ports_of_their_own(monkeypatch):
    """Of the tests' own: two that run at once don't choose the same port."""
    chosen = set()
    for index in range(len(RUNS)):
        monkeypatch.setenv("TESTS_PORTS", f"{index}/{len(RUNS)}")
        spec = own_ports.OwnPorts.find_spec(
            own_ports.MODULE, [os.path.dirname(addresses.__file__)]
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert len(module._PORTS) > 500
        assert not chosen & set(module._PORTS)
        chosen |= set(module._PORTS)
    # The finder came before whoever imports it in this process.
    monkeypatch.undo()
    if os.environ.get("TESTS_PORTS"):
        assert len(addresses._PORTS) < len(chosen)


def test_a_coordinator_serves_as_long_as_workers_run(launcher):
    script = launcher.script(
        """
        def served():
            file = here / "coordinator"
            return file.read_text().count("\\n") if file.exists() else 0
        while served() <= restarts:
            time.sleep(0.01)
        mark("address", os.environ["KERAS_DIST_COORDINATOR"])
        mark("job", os.environ["KERAS_DIST_JOB"])
        sys.exit(0 if restarts else 42)
        """
    )
    done = launcher.run(
        *("--workers", 2, "--max-restarts", 1, "--log-dir", "logs"),
        *("--backend", "served_engine", script),
    )
    assert done.returncode == 0, done.stderr
    served = (launcher.folder / "coordinator").read_text().splitlines()
    where = [line.split()[0] for line in served]
    assert [line.split()[1:] for line in served] == [["2", "[]"]] * 2
    assert len(set(where)) == 2
    assert launcher.marks("address", 2) == [where[-1]] * 2
    # Each start has a word of its own.
    jobs = (launcher.folder / "jobs").read_text().splitlines()
    assert len(set(jobs)) == 2
    assert launcher.marks("job", 2) == [jobs[-1]] * 2
    assert "serving" not in done.stdout + done.stderr
    for name in ("coordinator", "coordinator.restart-1"):
        log = launcher.folder / "logs" / f"{name}.log"
        assert "serving" in log.read_text()


def test_a_coordinator_that_fails_ends_all(launcher):
    done = launcher.run(
        *("--workers", 2, "--backend", "served_engine"),
        launcher.script("sleep()"),
        TEST_COORDINATOR_FAILS="1",
    )
    assert done.returncode == 1
    assert "the coordinator failed first" in done.stderr
    assert "  OSError: no port for the coordinator" in done.stderr
