"""A worker that dies, hangs or never comes: the others say who it was."""

import re
import signal
import socket

import pytest

import keras_dist
from conformance.contract import contract
from keras_dist.errors import RESTART_EXIT_CODE
from keras_dist.launch.addresses import free_addresses
from workers import fault_jobs
from workers.faults import ONE_CPU
from workers.faults import Worker
from workers.faults import assert_names
from workers.faults import go


@pytest.fixture
def start():
    """A function that starts workers; they are ended with the test."""
    started = []

    def start_worker(*args, **kwargs):
        started.append(Worker(*args, **kwargs))
        return started[-1]

    yield start_worker
    for worker in started:
        worker.close()


@contract(223, native=False)
@pytest.mark.parametrize("place", ["start", "step", "validation"])
@pytest.mark.parametrize("victim", [0, 1])
def test_killed(start, place, victim):
    addresses = free_addresses(2)
    workers = [
        start(i, addresses, place if i == victim else "nowhere")
        for i in range(2)
    ]
    go(*workers)
    workers[victim].wait_for("here")
    workers[victim].process.send_signal(signal.SIGKILL)
    status, seconds = workers[1 - victim].end()
    assert_names(workers[1 - victim], victim)
    assert status == RESTART_EXIT_CODE
    assert seconds < 40


def test_the_chief_is_killed_while_it_saves(start):
    addresses = free_addresses(2)
    chief = start(0, addresses, "saving")
    other = start(1, addresses)
    go(chief, other)
    chief.wait_for("here")
    chief.process.send_signal(signal.SIGKILL)
    status, _ = other.end()
    assert_names(other, 0)
    assert status == RESTART_EXIT_CODE


@pytest.mark.only_on("jax", "torch", reason="TensorFlow has no parts.")
@pytest.mark.parametrize("what", ["parts", "later parts"])
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_while_parts_are_saved(start, victim, what, tmp_path):
    """What was saved before is whole."""
    path = tmp_path / "checkpoint"
    addresses = free_addresses(2)
    variables = {**ONE_CPU, "CHECKPOINT": str(path)}
    workers = [
        start(
            index,
            addresses,
            f"in {what}" if index == victim else what,
            timeout=20,
            variables=variables,
        )
        for index in range(2)
    ]
    go(*workers)
    workers[victim].wait_for("here")
    workers[victim].process.send_signal(signal.SIGKILL)
    status, _ = workers[1 - victim].end()
    assert_names(workers[1 - victim], victim)
    assert status == RESTART_EXIT_CODE
    model = fault_jobs.wide_model()
    keras_dist.restore_sharded(model, path)
    assert all((weight == 1).all() for weight in model.get_weights())


@pytest.mark.runs_on("jax", "torch")
def test_a_loop_keeps_its_values_if_a_worker_is_killed(start):
    """What the last whole step made can be saved."""
    addresses = free_addresses(2)
    chief = start(0, addresses, "loop")
    other = start(1, addresses, "end of loop")
    go(chief, other)
    other.wait_for("here")
    other.process.send_signal(signal.SIGKILL)
    status, _ = chief.end()
    assert_names(chief, 1)
    assert status == RESTART_EXIT_CODE
    assert "kept" in chief.text().splitlines()


def test_one_of_three_is_killed(start):
    addresses = free_addresses(3)
    workers = [
        start(i, addresses, "step" if i == 2 else "nowhere") for i in range(3)
    ]
    go(*workers)
    workers[2].wait_for("here")
    workers[2].process.send_signal(signal.SIGKILL)
    for survivor in workers[:2]:
        status, _ = survivor.end()
        assert status == RESTART_EXIT_CODE
        assert "WorkerLostError" in survivor.text()
    assert_names(workers[0], 2)


@pytest.mark.parametrize("victim", [0, 1])
def test_native_code_holds_the_lock_of_python(start, victim):
    """The worker runs, so that it is no silent one."""
    addresses = free_addresses(2)
    workers = [
        start(i, addresses, f"{'' if i == victim else 'others '}native code")
        for i in range(2)
    ]
    go(*workers)
    workers[victim].wait_for("here")
    for worker in workers:
        before = len(worker.printed)
        while len(worker.printed) <= before:
            worker.wait_for("step")


@pytest.mark.parametrize("victim", [0, 1])
def test_stopped(start, victim):
    addresses = free_addresses(2)
    workers = [
        start(i, addresses, "step" if i == victim else "nowhere", timeout=15)
        for i in range(2)
    ]
    go(*workers)
    workers[victim].wait_for("here")
    workers[victim].process.send_signal(signal.SIGSTOP)
    status, seconds = workers[1 - victim].end()
    assert_names(workers[1 - victim], victim)
    assert status == RESTART_EXIT_CODE
    assert seconds < 60


@contract(223, 224, native=False)
def test_one_that_is_alive_but_takes_no_part(start):
    addresses = free_addresses(2)
    chief = start(0, addresses, timeout=15)
    other = start(1, addresses, "step", timeout=15)
    go(chief, other)
    other.wait_for("here")
    status, seconds = chief.end()
    assert "WorkerLostError" in chief.text()
    assert status == RESTART_EXIT_CODE
    assert seconds < 60


@pytest.mark.parametrize("absent", [0, 1])
def test_one_that_never_comes(start, absent):
    worker = start(1 - absent, free_addresses(2), timeout=5)
    go(worker)
    status, seconds = worker.end()
    assert_names(worker, absent)
    assert status == RESTART_EXIT_CODE
    assert seconds < 60


def test_a_port_in_use(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        chief = start(0, [address, *free_addresses(1)], timeout=5)
        go(chief)
        status, _ = chief.end()
    assert re.search(f"ClusterError: .*'{address}'", chief.text()), chief.text()
    assert status == 1


def test_an_unknown_host(start):
    addresses = ["no-such-host.invalid:9000", *free_addresses(1)]
    worker = start(1, addresses, timeout=5)
    go(worker)
    status, _ = worker.end()
    assert "ClusterError" in worker.text(), worker.text()
    assert "no-such-host.invalid" in worker.text()
    assert status == 1
