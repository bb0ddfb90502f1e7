"""DeviceAssignment: on which cores the replicas compute."""

import itertools

import numpy as np
import pytest

from keras_dist.tpu.experimental import DeviceAssignment
from keras_dist.tpu.experimental import DeviceOrderMode
from keras_dist.tpu.experimental import Topology


def _topology(*mesh, tasks=1, without=0):
    places = list(itertools.product(*map(range, mesh)))
    places = np.array(places[: len(places) - without])
    return Topology(
        mesh_shape=mesh, device_coordinates=places.reshape(tasks, -1, 4)
    )


def _ring(topology):
    count = topology.num_tasks * topology.num_tpus_per_task
    built = DeviceAssignment.build(topology, num_replicas=count)
    return built.core_assignment[:, 0].tolist()


def test_where_replicas_are():
    topology = _topology(2, 2, 1, 2, tasks=2)
    built = DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=4
    )
    assert built.topology is topology
    assert (built.num_replicas, built.num_cores_per_replica) == (4, 2)
    assert built.core_assignment.shape == (4, 2, 4)
    assert built.coordinates(1, 1) == (1, 0, 0, 1)
    assert built.tpu_ordinal(1, 1) == 1
    assert built.tpu_ordinal() == 0
    assert built.tpu_device(1, 1) == "/task:1/device:TPU:1"
    assert built.host_device(1, job="w") == "/job:w/task:1/device:CPU:0"
    assert built.lookup_replicas(0, 1) == [0, 3]
    assert built.lookup_replicas(1, 0) == [1, 2]


@pytest.mark.parametrize(("task", "core"), [(2, 0), (0, 2), (0, -1)])
def test_no_replica_is_there(task, core):
    built = DeviceAssignment.build(_topology(2, 1, 1, 2), num_replicas=2)
    with pytest.raises(ValueError, match=f"core {core} in task {task}"):
        built.lookup_replicas(task, core)


def test_one_replica_is_the_default():
    built = DeviceAssignment.build(_topology(2, 2, 1, 1).serialized())
    assert built.core_assignment.tolist() == [[[0, 0, 0, 0]]]


@pytest.mark.parametrize(
    "sides", [(4, 4, 1), (4, 1, 4), (1, 2, 6), (2, 4, 4), (4, 2, 2)]
)
def test_chips_form_a_ring(sides):
    ring = _ring(_topology(*sides, 1))
    assert len({tuple(place) for place in ring}) == np.prod(sides)
    for before, after in itertools.pairwise([*ring, ring[0]]):
        assert np.abs(np.subtract(before, after)).sum() == 1


def test_chips_in_a_line_or_with_odd_sides_are_in_rows():
    assert [x for x, *_ in _ring(_topology(5, 1, 1, 1))] == [0, 1, 2, 3, 4]
    assert [place[:2] for place in _ring(_topology(2, 3, 1, 1))] == [
        [x, y] for y in range(3) for x in range(2)
    ]


def test_a_mesh_in_place_of_a_ring():
    built = DeviceAssignment.build(
        _topology(2, 2, 1, 1),
        num_replicas=4,
        device_order_mode=DeviceOrderMode.MESH,
    )
    order = built.core_assignment[:, 0, :2].tolist()
    assert order == [[0, 0], [1, 0], [0, 1], [1, 1]]


def test_cores_that_are_missing_are_passed_over():
    topology = _topology(2, 2, 1, 1, without=1)
    built = DeviceAssignment.build(topology, num_replicas=3)
    assert built.core_assignment[:, 0].tolist() == [
        [0, 0, 0, 0],
        [0, 1, 0, 0],
        [1, 0, 0, 0],
    ]
    with pytest.raises(ValueError, match="Cores are missing.*3 are there"):
        DeviceAssignment.build(topology, num_replicas=4)
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
    ],
)
def test_what_can_not_be_built(options, reason):
    with pytest.raises(ValueError, match=reason):
        DeviceAssignment.build(_topology(2, 2, 1, 2), **options)


@pytest.mark.parametrize(
    ("topology", "cores", "reason"),
    [
        (None, [[[0, 0, 0, 0]]], "`topology` must be"),
        (_topology(2, 2, 1, 1), [[0, 0, 0, 0]], "`core_assignment` must be"),
        (_topology(2, 2, 1, 1), [[[0, 0, 0]]], "`core_assignment` must be"),
        (_topology(2, 2, 1, 1), [[[2, 0, 0, 0]]], "no such place"),
    ],
)
def test_what_is_no_assignment(topology, cores, reason):
    with pytest.raises(ValueError, match=reason):
        DeviceAssignment(topology, cores)
    if topology is None:
        with pytest.raises(ValueError, match=reason):
            DeviceAssignment.build(topology)
