"""`TPUStrategy` takes the devices that the compiler for TPUs describes."""

import itertools

import numpy as np
import pytest

from compiled.conftest import found_by

# Sides of the mesh, and hosts.
TARGETS = {
    "v5e:2x4": ([2, 4, 1, 1], 1),
    "v5e:4x4": ([4, 4, 1, 1], 4),
    "v4:2x2x2": ([2, 2, 2, 2], 2),
    "v5p:2x2x2": ([2, 2, 2, 1], 2),
    "tpu7x:2x2x1": ([2, 2, 1, 2], 1),
}


@pytest.fixture(scope="module")
def found():
    return found_by("compiled.tpus", TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_the_topology_is_that_of_the_slice(found, target):
    mesh, hosts = TARGETS[target]
    facts = found[target]
    assert (facts["mesh"], facts["tasks"]) == (mesh, hosts)
    assert not facts["missing"]
    count = np.prod(mesh) // hosts
    names = ", ".join(f"tpu:{index}" for index in range(count))
    where = f" of worker 0 of {hosts}" if hosts > 1 else ""
    assert facts["plan"] == names + where
    assert facts["same plan"]


@pytest.mark.parametrize("target", TARGETS)
def test_replicas_form_a_ring(found, target):
    mesh, hosts = TARGETS[target]
    facts = found[target]
    assert len(facts["devices"]) == np.prod(mesh) // hosts
    if mesh[-1] > 1:  # a replica would need both cores of a chip
        return
    ring = facts["ring"]
    for before, after in itertools.pairwise([*ring, ring[0]]):
        assert np.abs(np.subtract(before, after)).sum() == 1


def test_devices_are_in_the_ring_s_order(found):
    order = [int(name[4:]) for name in found["v5e:2x4"]["devices"]]
    assert order == [0, 1, 3, 5, 7, 6, 4, 2]
