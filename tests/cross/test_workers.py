"""Workers of one job on different backends hear so, each of them."""

import pytest

from cross.test_cross import pytestmark  # noqa: F401
from keras_dist.launch.addresses import free_addresses
from parity.harness import BACKENDS
from workers.faults import ONE_CPU
from workers.faults import Worker
from workers.faults import go


@pytest.mark.parametrize("place", range(3))
def test_another_backend_on_one_of_the_workers(place):
    addresses = free_addresses(2)
    names = BACKENDS[place], BACKENDS[(place + 1) % 3]
    workers = [
        Worker(i, addresses, variables={**ONE_CPU, "KERAS_BACKEND": name})
        for i, name in enumerate(names)
    ]
    try:
        go(*workers)
        for worker in workers:
            status, _ = worker.end()
            text = worker.text()
            assert status == 1, text
            assert f"Received: backend='{names[1]}' from worker 1" in text
            assert f"Expected: backend='{names[0]}'" in text
            assert "KERAS_BACKEND" in text
    finally:
        for worker in workers:
            worker.close()
