"""A topology says where a TPU's cores are, an assignment who computes there.

tests/backends/tensorflow compares both with TensorFlow's own.
"""

import itertools

import numpy as np
import pytest

from keras_dist.tpu.experimental import DeviceAssignment
from keras_dist.tpu.experimental import DeviceOrderMode
from keras_dist.tpu.experimental import Topology

PLACES = [
    [[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0]],
    [[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 0, 1]],
]
MESH = [2, 2, 1, 2]
# Sides, two numbers and places, as TensorFlow writes them.
OF_TENSORFLOW = (
    b"\n\x04\x02\x02\x01\x02\x10\x02\x18\x03\x22\x18"
    + np.array(PLACES, np.uint8).tobytes()
)


def test_a_topology_travels_as_bytes():
    sent = Topology(mesh_shape=MESH, device_coordinates=PLACES)
    topology = Topology(sent.serialized())
    assert topology.mesh_shape.tolist() == MESH
    assert topology.device_coordinates.tolist() == PLACES
    for place in ([0, 2, 0, 0], [0, -1, 0, 0], [0] * 3, [0.5, 0, 0, 0], None):
        with pytest.raises(ValueError, match="Received"):
            topology.task_ordinal_at_coordinates(place)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        *(
            ({"mesh_shape": mesh}, "`mesh_shape` must be")
            for mesh in (None, [2, 2, 2], [0, 1, 1, 1], "2x2", [[1]])
        ),
        *(
            ({"device_coordinates": places}, reason)
            for places, reason in (
                (None, "must be an array of integers"),
                ([[[0, 0, 0, 0]], [[0]]], "must be an array of integers"),
                ([[0, 0, 0, 0]], r"shape \(tasks, devices, 4\)"),
                ([[[0, 0, 0]]], r"shape \(tasks, devices, 4\)"),
                ([[[2, 0, 0, 0]]], "must be places of the mesh"),
                ([[[-1, 0, 0, 0]]], "must be places of the mesh"),
                ([[[1, 0, 0, 0]] * 2], r"2 cores at \[1, 0, 0, 0\]"),
            )
        ),
        *(
            ({"serialized": data}, "Received: .*TensorFlow reads its")
            for data in ("a text", 5, b'{"mesh_shape": []}', OF_TENSORFLOW)
        ),
    ],
)
def test_what_is_no_topology(options, reason):
    if "serialized" not in options:
        options = {"mesh_shape": MESH, "device_coordinates": PLACES} | options
    with pytest.raises(ValueError, match=f"(?s){reason}"):
        Topology(**options)


def _topology(*mesh, tasks=1, without=0):
    places = list(itertools.product(*map(range, mesh)))
    places = np.array(places[: len(places) - without])
    return Topology(
        mesh_shape=mesh, device_coordinates=places.reshape(tasks, -1, 4)
    )


def _order(topology, count=None, **options):
    """The cores of one-core replicas, in their order."""
    count = count or topology.num_tasks * topology.num_tpus_per_task
    built = DeviceAssignment.build(topology, num_replicas=count, **options)
    return built.core_assignment[:, 0].tolist()


def test_where_replicas_are():
    topology = _topology(2, 2, 1, 2, tasks=2)
    built = DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=4
    )
    assert built.topology is topology
    assert built.lookup_replicas(0, 1) == [0, 3]
    for task, core in ((2, 0), (0, 2), (0, -1)):
        with pytest.raises(ValueError, match=f"core {core} in task {task}"):
            built.lookup_replicas(task, core)
    # One replica is the default.
    built = DeviceAssignment.build(topology.serialized())
    assert built.core_assignment.tolist() == [[[0, 0, 0, 0]]]


@pytest.mark.parametrize(
    "sides", [(4, 4, 1), (4, 1, 4), (1, 2, 6), (2, 4, 4), (4, 2, 2)]
)
def test_chips_form_a_ring(sides):
    ring = _order(_topology(*sides, 1))
    assert len({tuple(place) for place in ring}) == np.prod(sides)
    for before, after in itertools.pairwise([*ring, ring[0]]):
        assert np.abs(np.subtract(before, after)).sum() == 1


def test_chips_that_form_no_ring_are_in_rows():
    assert [x for x, *_ in _order(_topology(5, 1, 1, 1))] == [0, 1, 2, 3, 4]
    rows = [[x, y, 0, 0] for y in range(3) for x in range(2)]
    assert _order(_topology(2, 3, 1, 1)) == rows
    mesh = DeviceOrderMode.MESH
    square = _topology(2, 2, 1, 1)
    assert _order(square, device_order_mode=mesh) == rows[:4]
    # Cores that are missing are passed over.
    topology = _topology(2, 2, 1, 1, without=1)
    found = [[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]
    assert _order(topology) == found
    with pytest.raises(ValueError, match="(?s)Cores are missing.*3 are there"):
        _order(topology, 4)
    with pytest.raises(ValueError, match="and no strides"):
        DeviceAssignment.build(topology, computation_stride=[2, 1, 1, 1])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"computation_shape": [1, 1, 1]}, "`computation_shape` must be"),
        ({"computation_shape": [1, 1, 1, 0]}, "`computation_shape` must be"),
        ({"computation_shape": "2x2"}, "`computation_shape` must be"),
        ({"computation_stride": [1.5] * 4}, "`computation_stride` must be"),
        ({"computation_shape": [1, 1, 2, 1]}, "don't fit into the mesh"),
        (
            {"computation_shape": [2, 1, 1, 1], "computation_stride": [2] * 4},
            "don't fit into the mesh",
        ),
        ({"num_replicas": 9}, "room for 1 to 8 replicas"),
        ({"num_replicas": 0}, "room for 1 to 8 replicas"),
        ({"num_replicas": 1.5}, "room for 1 to 8 replicas"),
        ({"device_order_mode": DeviceOrderMode.RING}, "can't form a ring"),
        ({"topology": None}, "`topology` must be"),
    ],
)
def test_what_can_not_be_built(options, reason):
    with pytest.raises(ValueError, match=f"(?s){reason}"):
        DeviceAssignment.build(**{"topology": _topology(2, 2, 1, 2)} | options)


@pytest.mark.parametrize(
    ("cores", "reason"),
    [
        ([[0, 0, 0, 0]], "`core_assignment` must be"),
        ([[[0, 0, 0]]], "`core_assignment` must be"),
        ([[[2, 0, 0, 0]]], "no such place"),
    ],
)
def test_what_is_no_assignment(cores, reason):
    with pytest.raises(ValueError, match=f"(?s){reason}"):
        DeviceAssignment(_topology(2, 2, 1, 1), cores)
    with pytest.raises(ValueError, match="`topology` must be"):
        DeviceAssignment(None, cores)
