"""Workers of another job, or one too many, are refused by name."""

import re

import pytest

from keras_dist.launch.addresses import free_addresses
from workers.faults import ONE_CPU
from workers.faults import Worker
from workers.faults import go
from workers.faults import goes_on


@pytest.fixture
def start():
    """A function that starts workers; they are ended with the test."""
    started = []

    def start_worker(index, addresses, job="job 1", timeout=200):
        variables = {**ONE_CPU, "KERAS_DIST_JOB": job}
        started.append(
            Worker(index, addresses, timeout=timeout, variables=variables)
        )
        return started[-1]

    yield start_worker
    for worker in started:
        worker.close()


def assert_refused(worker, *told):
    status, _ = worker.end()
    text = worker.text()
    assert status == 1, text[-4000:]
    (message,) = re.findall(r"ClusterError: ((?:.+\n)+)", text)
    for each in told:
        assert each in message


def test_a_worker_of_another_job_is_refused(start):
    """It is the first to come, and those of the job go on without it."""
    addresses = free_addresses(2)
    stranger = start(1, addresses, job="job 2")
    chief = start(0, addresses)
    go(stranger, chief)
    assert_refused(
        stranger,
        f"process {stranger.process.pid} on",
        "Received: worker 1 of 'job 2'",
        "Expected: workers of 'job 1'",
    )
    other = start(1, addresses)
    go(other)
    for worker in (chief, other):
        worker.wait_for("step")


def test_a_worker_that_comes_to_a_job_that_runs(start):
    """Another one of the same index, such as one from an earlier start."""
    addresses = free_addresses(2)
    workers = [start(index, addresses) for index in range(2)]
    go(*workers)
    workers[0].wait_for("step")
    late = start(1, addresses, timeout=5)
    go(late)
    status, _ = late.end()
    assert status, late.text()[-4000:]
    # TensorFlow's workers need their own ports.
    assert re.search(
        r"Error: .*(a job that runs already|is in use: process \d+)",
        late.text(),
    ), late.text()[-4000:]
    goes_on(*workers)


def test_two_workers_of_the_same_index(start):
    addresses = free_addresses(4)
    workers = [start(index, addresses[:3]) for index in range(2)]
    # On TensorFlow, each needs the port that it has to itself.
    workers.append(start(1, [addresses[0], addresses[3], addresses[2]]))
    go(*workers)
    for worker in workers:
        assert_refused(
            worker,
            "Two processes are worker 1 of 'job 1'",
            *(f"process {each.process.pid} on" for each in workers[1:]),
        )
