"""Workers that know the first one's address alone train together."""

import sys

import pytest

from workers import listening_script
from workers import two_hosts
from workers.test_ports import can_isolate
from workers.test_ports import on_two_hosts

pytestmark = can_isolate
LEADER = (f"MASTER_ADDR={two_hosts.ADDRESSES[0]}", "MASTER_PORT=9000")


@pytest.mark.only_on(
    "jax",
    "torch",
    reason="TensorFlow's workers need each other's addresses.",
)
@pytest.mark.parametrize(
    "variables",
    [
        ("RANK=INDEX", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=1"),
        (
            "OMPI_COMM_WORLD_RANK=INDEX",
            "OMPI_COMM_WORLD_SIZE=2",
            "OMPI_COMM_WORLD_LOCAL_SIZE=1",
        ),
    ],
    ids=["torchrun", "Open MPI"],
)
def test_workers_of_two_hosts_train_together(variables):
    shown = on_two_hosts(
        *("env", *LEADER, *variables, sys.executable),
        listening_script.__file__,
    )
    assert all("2 workers" in text for text in shown), shown
