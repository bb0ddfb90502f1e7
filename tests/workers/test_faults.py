"""If a worker dies, hangs or never comes, the others say who it was."""

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
from workers.faults import goes_on


@pytest.fixture
def start():
    """A function that starts workers; they are ended with the test."""
    started = []

    def start_workers(*places, addresses=None, first=0, **options):
        addresses = addresses or free_addresses(len(places))
        own = [
            Worker(index, addresses, place, **options)
            for index, place in enumerate(places, first)
        ]
        started.extend(own)
        go(*own)
        return own

    yield start_workers
    for worker in started:
        worker.close()


def lose(workers, victim, number=signal.SIGKILL):
    """Sends a signal to one that has said where it is; the others' seconds."""
    lost = workers.pop(victim)
    lost.wait_for("here")
    if number:
        lost.process.send_signal(number)
    ends = [worker.end() for worker in workers]
    for worker, (status, _) in zip(workers, ends, strict=True):
        assert status == RESTART_EXIT_CODE
        assert "WorkerLostError" in worker.text()
    if number:
        assert_names(workers[0], victim)
    return max(seconds for _, seconds in ends)


@contract(223, native=False)
@pytest.mark.parametrize(
    ("place", "victim"),
    [
        *(("start", 0), ("start", 1), ("step", 0), ("step", 1)),
        *(("validation", 1), ("saving", 0)),
    ],
)
def test_killed(start, place, victim):
    places = [place if index == victim else "nowhere" for index in range(2)]
    assert lose(start(*places), victim) < 40


def test_one_of_three_is_killed(start):
    lose(start("nowhere", "nowhere", "step"), 2)


@pytest.mark.only_on("jax", "torch", reason="TensorFlow has no parts.")
@pytest.mark.parametrize("what", ["parts", "later parts"])
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_while_parts_are_saved(start, victim, what, tmp_path):
    """What was saved before is whole."""
    path = tmp_path / "checkpoint"
    places = [f"in {what}" if index == victim else what for index in range(2)]
    variables = {**ONE_CPU, "CHECKPOINT": str(path)}
    lose(start(*places, timeout=20, variables=variables), victim)
    model = fault_jobs.wide_model()
    keras_dist.restore_sharded(model, path)
    assert all((weight == 1).all() for weight in model.get_weights())


@pytest.mark.runs_on("jax", "torch")
def test_a_loop_keeps_its_values_if_a_worker_is_killed(start):
    """What the last whole step made can be saved."""
    workers = start("loop", "end of loop")
    lose(workers, 1)
    assert "kept" in workers[0].text().splitlines()


@pytest.mark.parametrize("victim", [0, 1])
def test_native_code_holds_the_lock_of_python(start, victim):
    """The worker runs, so that it is no silent one."""
    workers = start(
        *(f"{'' if i == victim else 'others '}native code" for i in range(2))
    )
    workers[victim].wait_for("here")
    goes_on(*workers)


@pytest.mark.parametrize("victim", [0, 1])
def test_stopped(start, victim):
    places = ["step" if index == victim else "nowhere" for index in range(2)]
    assert lose(start(*places, timeout=15), victim, signal.SIGSTOP) < 60


@contract(223, 224, native=False)
def test_one_that_is_alive_but_takes_no_part(start):
    assert lose(start("nowhere", "step", timeout=15), 1, None) < 60


@pytest.mark.parametrize("absent", [0, 1])
def test_one_that_never_comes(start, absent):
    (worker,) = start(
        "nowhere", addresses=free_addresses(2), first=1 - absent, timeout=5
    )
    status, seconds = worker.end()
    assert_names(worker, absent)
    assert status == RESTART_EXIT_CODE
    assert seconds < 60


def test_a_port_in_use(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        addresses = [address, *free_addresses(1)]
        (chief,) = start("nowhere", addresses=addresses, timeout=5)
        status, _ = chief.end()
    assert re.search(f"ClusterError: .*'{address}'", chief.text()), chief.text()
    assert status == 1


def test_an_unknown_host(start):
    addresses = ["no-such-host.invalid:9000", *free_addresses(1)]
    (worker,) = start("nowhere", addresses=addresses, first=1, timeout=5)
    status, _ = worker.end()
    assert "ClusterError" in worker.text(), worker.text()
    assert "no-such-host.invalid" in worker.text()
    assert status == 1
