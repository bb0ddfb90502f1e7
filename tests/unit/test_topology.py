"""Topology: where the cores of a TPU are."""

import numpy as np
import pytest

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


@pytest.fixture(params=["arrays", "bytes"])
def topology(request):
    made = Topology(mesh_shape=MESH, device_coordinates=PLACES)
    return made if request.param == "arrays" else Topology(made.serialized())


def test_its_sides_and_places(topology):
    assert topology.mesh_shape.tolist() == MESH
    assert topology.mesh_shape.dtype == np.int32
    assert topology.mesh_rank == 4
    assert topology.device_coordinates.tolist() == PLACES
    assert (topology.num_tasks, topology.num_tpus_per_task) == (2, 3)
    assert topology.missing_devices.tolist() == [[0, 1, 0, 1], [1, 1, 0, 0]]


def test_who_is_at_a_place(topology):
    place = [0, 1, 0, 0]
    assert topology.task_ordinal_at_coordinates(place) == 1
    assert topology.tpu_device_ordinal_at_coordinates(place) == 1
    name = topology.tpu_device_name_at_coordinates
    assert name(place) == "/task:1/device:TPU:1"
    assert name(place, job="w") == "/job:w/task:1/device:TPU:1"
    host = topology.cpu_device_name_at_coordinates
    assert host(place) == "/task:1/device:CPU:0"
    assert host(place, job="w") == "/job:w/task:1/device:CPU:0"
    assert topology.task_ordinal_at_coordinates((1, 1, 0, 0)) == -1


@pytest.mark.parametrize(
    "place", [[0, 2, 0, 0], [0, -1, 0, 0], [0, 0, 0], [0.5, 0, 0, 0], None]
)
def test_what_is_no_place(topology, place):
    with pytest.raises(ValueError, match="Received"):
        topology.task_ordinal_at_coordinates(place)


@pytest.mark.parametrize("mesh", [None, [2, 2, 2], [0, 1, 1, 1], "2x2", [[1]]])
def test_what_are_no_sides(mesh):
    with pytest.raises(ValueError, match="`mesh_shape` must be"):
        Topology(mesh_shape=mesh, device_coordinates=PLACES)


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        (None, "must be an array of integers"),
        ([[[0, 0, 0, 0]], [[0]]], "must be an array of integers"),
        ([[0, 0, 0, 0]], r"shape \(tasks, devices, 4\)"),
        ([[[0, 0, 0]]], r"shape \(tasks, devices, 4\)"),
        ([[[2, 0, 0, 0]]], "must be places of the mesh"),
        ([[[-1, 0, 0, 0]]], "must be places of the mesh"),
        ([[[1, 0, 0, 0], [1, 0, 0, 0]]], r"2 cores at \[1, 0, 0, 0\]"),
    ],
)
def test_what_are_no_places(places, reason):
    with pytest.raises(ValueError, match=reason):
        Topology(mesh_shape=MESH, device_coordinates=places)


@pytest.mark.parametrize(
    "data", ["a text", 5, b'{"mesh_shape": [1, 1, 1, 1]}', b"[]", OF_TENSORFLOW]
)
def test_bytes_that_are_none(data):
    with pytest.raises(ValueError, match="Received: .*TensorFlow reads its"):
        Topology(data)
