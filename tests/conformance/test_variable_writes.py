"""Writes of variables, in replicas and outside, reach all copies or none."""

import keras
import pytest

from conformance.contract import contract
from conformance.helpers import local
from conformance.helpers import replica_id
from conformance.variables import AGGREGATIONS
from conformance.variables import SYNCHRONIZATIONS
from conformance.variables import copies
from conformance.variables import current
from conformance.variables import in_replicas
from conformance.variables import refuses
from conformance.variables import variable


@contract(124, 125, 127)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("context", ["outside", "cross", "replica"])
def test_writes_alike_everywhere(api, mirrored, aggregation, context):
    n = mirrored.num_replicas_in_sync
    v, other = (
        variable(api, mirrored, initial, aggregation=aggregation)
        for initial in (0.0, 2.0)
    )

    def write():
        v.assign(5.0)
        v.assign_add(2.0)
        v.assign_sub(1.0)

    if context == "outside":
        write()
    elif context == "cross" or aggregation == "sum":
        with mirrored.scope():
            write()
    else:
        mirrored.run(write)
    assert copies(v) == [6.0] * n
    if context == "cross":
        with mirrored.scope():
            v.assign(current(other))
        assert copies(v) == [2.0] * n
    elif context == "replica":
        mirrored.run(lambda: v.assign(current(other)))
        assert copies(v) == [2.0 * n if aggregation == "sum" else 2.0] * n


@contract(125, native=False)
def test_the_variable_itself_may_be_given(api, two):
    v = variable(api, two, 0.0)
    other = variable(api, two, 2.0)
    with two.scope():
        v.assign(other)
    assert copies(v) == [2.0, 2.0]
    two.run(lambda: v.assign_add(other))
    assert copies(v) == [4.0, 4.0]


@contract(129, 133)
def test_only_the_first_replica_counts(api, mirrored):
    """And a step is counted once."""
    n = mirrored.num_replicas_in_sync
    options = {"aggregation": "only_first_replica"}
    v = variable(api, mirrored, 7.0, **options)
    options |= {"dtype": "int32", "trainable": False}
    counter = variable(api, mirrored, 0, **options)

    def step():
        r = keras.ops.convert_to_tensor(float(replica_id(api)))
        counter.assign_add(1)
        return keras.ops.add(v.assign(r), 0.0)

    returned = mirrored.run(step)
    assert [part.tolist() for part in local(returned)] == [0.0] * n
    assert copies(v) == [0.0] * n
    assert copies(counter) == [1] * n


@contract(130)
def test_a_total_is_spread_over_the_replicas(api, mirrored):
    n = mirrored.num_replicas_in_sync
    v = variable(api, mirrored, synchronization="on_read", aggregation="sum")
    with mirrored.scope():
        v.assign(float(n))
        assert copies(v) == [1.0] * n
        for write in (v.assign_add, v.assign_sub):
            with refuses(ValueError, v):
                write(1.0)
    # It replaces what replicas had.
    in_replicas(api, mirrored, v.assign_add)
    v.assign(4.0 * n)
    seen = mirrored.run(lambda: current(v))
    assert [part.tolist() for part in local(seen)] == [4.0] * n


@contract(128, 132)
@pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
def test_a_write_returns_the_new_value_here(api, two, synchronization):
    v = variable(
        api, two, 1.0, synchronization=synchronization, aggregation="mean"
    )

    def step():
        r = keras.ops.convert_to_tensor(float(replica_id(api)))
        return (
            keras.ops.add(v.assign(r), 0.0),
            keras.ops.add(v.assign_add(r + 1), 0.0),
            keras.ops.add(v.assign_sub(r), 0.0),
        )

    returned = two.run(step)
    expected = {
        "on_write": [[0.5, 0.5], [2.0, 2.0], [1.5, 1.5]],
        "on_read": [[0.0, 1.0], [1.0, 3.0], [1.0, 2.0]],
    }[synchronization]
    assert [[p.tolist() for p in local(x)] for x in returned] == expected
    assert copies(v) == expected[-1]


@contract(135)
@pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
@pytest.mark.parametrize("aggregation", ["mean", "only_first_replica"])
def test_wrong_shapes_change_no_copy(api, two, synchronization, aggregation):
    v = variable(
        api,
        two,
        [1.0, 2.0],
        synchronization=synchronization,
        aggregation=aggregation,
    )
    wrong = keras.ops.ones((3,))
    with refuses(ValueError, v):
        two.run(lambda: v.assign(wrong))
    with refuses(ValueError, v):
        v.assign(wrong)
    two.run(lambda: v.assign(keras.ops.ones((2,))))
    assert copies(v) == [[1.0, 1.0]] * 2


@contract(135, native=False)
def test_a_wrong_shape_on_one_replica_changes_no_copy(api, mirrored):
    v = variable(api, mirrored, [1.0, 2.0], aggregation="mean")
    last = mirrored.num_replicas_in_sync - 1

    def step():
        v.assign(keras.ops.ones((3 if replica_id(api) == last else 2,)))

    with refuses(ValueError, v):
        mirrored.run(step)
