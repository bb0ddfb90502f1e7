"""Variables: writing, in replica and in cross-replica context."""

import keras
import pytest

from conformance.contract import contract
from conformance.helpers import local
from conformance.helpers import replica_id
from conformance.variables import AGGREGATIONS
from conformance.variables import SYNCHRONIZATIONS
from conformance.variables import copies
from conformance.variables import in_replicas
from conformance.variables import parts
from conformance.variables import read
from conformance.variables import refuses
from conformance.variables import variable


@contract(124)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    ("method", "value"),
    [("assign", 1.0), ("assign_add", 1.0), ("assign_sub", -1.0)],
)
@pytest.mark.parametrize("context", ["cross", "replica"])
def test_writes_alike_everywhere(
    api, mirrored, aggregation, method, value, context
):
    v = variable(api, mirrored, 0.0, aggregation=aggregation)
    if context == "cross" or aggregation == "sum":
        with mirrored.scope():
            getattr(v, method)(value)
    else:
        mirrored.run(lambda: getattr(v, method)(value))
    assert copies(v) == [1.0] * mirrored.num_replicas_in_sync


@contract(125)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("context", ["cross", "replica"])
def test_the_value_may_be_a_variable(api, mirrored, aggregation, context):
    if (context, aggregation) == ("replica", "sum"):
        expected = 2.0 * mirrored.num_replicas_in_sync
    else:
        expected = 2.0
    v = variable(api, mirrored, 0.0, aggregation=aggregation)
    other = variable(api, mirrored, 2.0, aggregation=aggregation)
    if context == "cross":
        with mirrored.scope():
            v.assign(keras.ops.add(other, 0.0))
    else:
        mirrored.run(lambda: v.assign(keras.ops.add(other, 0.0)))
    assert copies(v) == [expected] * mirrored.num_replicas_in_sync


@contract(125, native=False)
def test_the_variable_itself_may_be_given(api, two):
    v = variable(api, two, 0.0)
    other = variable(api, two, 2.0)
    with two.scope():
        v.assign(other)
    assert copies(v) == [2.0, 2.0]
    two.run(lambda: v.assign_add(other))
    assert copies(v) == [4.0, 4.0]


@contract(126)
@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("sum", 4.0), ("mean", 2.0), ("only_first_replica", 2.0)],
)
def test_components_given_to_run_are_combined(api, two, aggregation, expected):
    v = variable(api, two, 0.0, aggregation=aggregation)
    two.run(lambda x: v.assign(x), args=(parts(two, [2.0, 2.0]),))
    assert copies(v) == [expected, expected]


@contract(127)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_writes_outside_of_any_scope_reach_all_copies(
    api, mirrored, aggregation
):
    v = variable(api, mirrored, 0.0, aggregation=aggregation)
    v.assign(5.0)
    v.assign_add(2.0)
    v.assign_sub(1.0)
    assert copies(v) == [6.0] * mirrored.num_replicas_in_sync


@contract(128)
@pytest.mark.parametrize(
    ("initial", "method", "different", "equal"),
    [
        (0.0, "assign", 0.5, 5.0),
        (1.0, "assign_add", 1.5, 6.0),
        (5.0, "assign_sub", 4.5, 0.0),
    ],
)
def test_means_of_writes(api, two, initial, method, different, equal):
    v = variable(api, two, initial, aggregation="mean")
    in_replicas(api, two, lambda r: getattr(v, method)(r))
    assert copies(v) == [different, different]
    v = variable(api, two, initial, aggregation="mean")
    two.run(lambda: getattr(v, method)(5.0))
    assert copies(v) == [equal, equal]


@contract(129)
def test_only_the_first_replica_counts(api, mirrored):
    v = variable(api, mirrored, 7.0, aggregation="only_first_replica")

    def step():
        r = keras.ops.convert_to_tensor(float(replica_id(api)))
        return keras.ops.add(v.assign(r), 0.0)

    returned = mirrored.run(step)
    n = mirrored.num_replicas_in_sync
    assert [part.tolist() for part in local(returned)] == [0.0] * n
    assert copies(v) == [0.0] * n


@contract(130)
@pytest.mark.parametrize("method", ["assign_add", "assign_sub"])
def test_a_total_is_spread_over_the_replicas(api, mirrored, method):
    n = mirrored.num_replicas_in_sync
    v = variable(api, mirrored, synchronization="on_read", aggregation="sum")
    with mirrored.scope():
        v.assign(float(n))
        assert copies(v) == [1.0] * n
        with refuses(ValueError, v):
            getattr(v, method)(1.0)


@contract(131)
@pytest.mark.parametrize(("aggregation", "start"), [("sum", 2), ("mean", 1)])
def test_what_is_assigned_is_read(api, two, aggregation, start):
    v = variable(
        api, two, 1.0, synchronization="on_read", aggregation=aggregation
    )
    with two.scope():
        assert read(v) == start
        v.assign(6.0)
        assert read(v) == 6.0
    assert read(v) == 6.0


@contract(132)
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


@contract(133)
def test_a_step_is_counted_once(api, mirrored):
    counter = variable(
        api,
        mirrored,
        0,
        dtype="int32",
        trainable=False,
        aggregation="only_first_replica",
    )
    mirrored.run(lambda: counter.assign_add(1))
    assert copies(counter) == [1] * mirrored.num_replicas_in_sync


@contract(135)
@pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
@pytest.mark.parametrize("aggregation", ["mean", "only_first_replica"])
@pytest.mark.parametrize("context", ["cross", "replica"])
def test_wrong_shapes_change_no_copy(
    api, two, synchronization, aggregation, context
):
    v = variable(
        api,
        two,
        [1.0, 2.0],
        synchronization=synchronization,
        aggregation=aggregation,
    )
    wrong = keras.ops.ones((3,))
    with refuses(ValueError, v):
        if context == "replica":
            two.run(lambda: v.assign(wrong))
        else:
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
