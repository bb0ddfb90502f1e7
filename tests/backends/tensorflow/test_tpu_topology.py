"""Topologies and device assignments are those of TensorFlow's own classes."""

import itertools

import hypothesis
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from keras_dist.tpu.experimental import DeviceAssignment
from keras_dist.tpu.experimental import DeviceOrderMode
from keras_dist.tpu.experimental import Topology

NATIVE = tf.tpu.experimental


@st.composite
def _topologies(draw):
    """Arguments of a topology: cores in any order, some may be missing."""
    mesh = [
        draw(st.integers(1, most)) for most in draw(st.permutations([4, 4, 2]))
    ]
    mesh.append(draw(st.sampled_from([1, 2])))
    places = draw(st.permutations([*itertools.product(*map(range, mesh))]))
    tasks = draw(st.sampled_from([1, 2, 4]))
    if draw(st.integers(0, 5)) == 0:
        places = places[len(places) // 3 :]
    if len(places) % tasks:
        tasks = 1
    coordinates = np.array(places).reshape(tasks, -1, 4)
    return {"mesh_shape": mesh, "device_coordinates": coordinates}


@st.composite
def _computations(draw, mesh):
    """Arguments of `build`, most of which fit the mesh."""
    sides = st.tuples(*(st.sampled_from([1, 1, 2, side]) for side in mesh))
    shape = draw(st.none() | sides)
    stride = draw(st.none() | st.none() | sides)
    footprint = np.multiply(shape or [1] * 4, stride or [1] * 4)
    most = int(np.prod(mesh // footprint * np.array(stride or [1] * 4)))
    count = draw(st.sampled_from([1, most, most + 1]) | st.integers(1, 64))
    return shape, stride, max(count, 1), draw(st.sampled_from([0, 0, 1, 2]))


def _built(assignment, topology, order, arguments):
    *arguments, mode = arguments
    try:
        return assignment.build(topology, *arguments, order(mode))
    except (ValueError, AssertionError):
        return None


@hypothesis.given(st.data())
def test_a_topology_is_the_original(data):
    arguments = data.draw(_topologies())
    ours, theirs = Topology(**arguments), NATIVE.Topology(**arguments)
    for name in ("mesh_shape", "device_coordinates", "missing_devices"):
        np.testing.assert_array_equal(
            getattr(ours, name), getattr(theirs, name)
        )
    for name in ("mesh_rank", "num_tasks", "num_tpus_per_task"):
        assert getattr(ours, name) == getattr(theirs, name)
    for place in np.ndindex(*arguments["mesh_shape"]):
        for name in (
            "task_ordinal_at_coordinates",
            "tpu_device_ordinal_at_coordinates",
            "cpu_device_name_at_coordinates",
            "tpu_device_name_at_coordinates",
        ):
            assert getattr(ours, name)(place) == getattr(theirs, name)(place)


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.data())
def test_an_assignment_is_the_original(data):
    arguments = data.draw(_topologies())
    computation = data.draw(_computations(arguments["mesh_shape"]))
    topology = Topology(**arguments)
    ours = _built(DeviceAssignment, topology, DeviceOrderMode, computation)
    theirs = _built(
        NATIVE.DeviceAssignment,
        NATIVE.Topology(**arguments),
        NATIVE.DeviceOrderMode,
        computation,
    )
    assert (ours is None) == (theirs is None)
    if theirs is None:
        return
    np.testing.assert_array_equal(ours.core_assignment, theirs.core_assignment)
    assert ours.num_replicas == theirs.num_replicas
    assert ours.num_cores_per_replica == theirs.num_cores_per_replica
    for replica, core in np.ndindex(*theirs.core_assignment.shape[:2]):
        assert ours.coordinates(replica, core) == theirs.coordinates(
            replica, core
        )
        assert ours.tpu_ordinal(replica, core) == theirs.tpu_ordinal(
            replica, core
        )
        for name in ("host_device", "tpu_device"):
            found = getattr(ours, name)(replica, core, job="worker")
            assert found == getattr(theirs, name)(replica, core, job="worker")
        place = theirs.coordinates(replica, core)
        task = topology.task_ordinal_at_coordinates(place)
        assert ours.lookup_replicas(task, core) == theirs.lookup_replicas(
            task, core
        )
