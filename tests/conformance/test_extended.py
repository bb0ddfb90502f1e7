"""`Strategy.extended` updates each copy, and reduces to where it is told."""

import keras
import pytest

from conformance.contract import contract
from conformance.helpers import numbers
from conformance.helpers import raw
from conformance.helpers import tensor
from conformance.helpers import to_numpy
from conformance.variables import AGGREGATIONS
from conformance.variables import copies
from conformance.variables import parts
from conformance.variables import read
from conformance.variables import refuses
from conformance.variables import variable


def _names(devices):
    """`("cpu:0", ...)`, whatever stands before it in the original."""
    return tuple(name.rsplit("device:", 1)[-1].lower() for name in devices)


@contract(149)
def test_devices_are_named_in_order(api, mirrored):
    names = tuple(f"cpu:{i}" for i in range(mirrored.num_replicas_in_sync))
    one = api.OneDeviceStrategy("cpu:1")
    for strategy, expected in ((mirrored, names), (one, ("cpu:1",))):
        extended = strategy.extended
        for found in (extended.worker_devices, extended.parameter_devices):
            assert isinstance(found, tuple)
            assert _names(found) == expected


@contract(149, native=False)
def test_names_of_devices_are_canonical(api):
    strategy = api.MirroredStrategy(["/CPU:1", "cpu:0"])
    assert strategy.extended.worker_devices == ("cpu:1", "cpu:0")


@contract(149)
@pytest.mark.parametrize("name", ["worker_devices", "parameter_devices"])
def test_the_default_strategy_has_no_devices(api, name):
    extended = api.get_strategy().extended
    with pytest.raises(
        RuntimeError, match=rf"(?s){name}.*unsupported by default"
    ):
        getattr(extended, name)


@contract(150)
def test_update_calls_once_a_copy(api, mirrored):
    n = mirrored.num_replicas_in_sync
    v = variable(api, mirrored, 1.0)
    given = parts(mirrored, [float(r) for r in range(n)])
    seen = []

    def add(component, x, scale):
        seen.append(to_numpy(x).tolist())
        component.assign_add(scale)
        return keras.ops.add(x, component)

    result = mirrored.extended.update(v, add, (given,), {"scale": 2.0})
    assert seen == [float(r) for r in range(n)]
    assert numbers(result) == [3.0 + r for r in range(n)]
    assert copies(v) == [3.0] * n


@contract(150)
def test_equal_components_given_to_update(api, two):
    v = variable(api, two, 1.0)
    other = variable(api, two, 4.0)
    mean = two.extended.reduce_to("mean", parts(two, [2.0, 4.0]), v)
    two.extended.update(v, lambda c, x: c.assign_add(x), (mean,))
    two.extended.update(v, lambda c, x: c.assign_add(x), (other,))
    assert copies(v) == [8.0, 8.0]


@contract(150)
def test_results_of_update(api, two):
    """They are mirrored, in a structure, or one by one."""
    v = variable(api, two, 1.0)
    given = (parts(two, [1.0, 2.0]),)
    result = two.extended.update(
        v, lambda c, x: {"sum": keras.ops.add(c, x), "none": None}, given
    )
    assert numbers(result["sum"]) == [2.0, 3.0]
    assert repr(result["sum"]).startswith("Mirrored:{\n  0: ")
    assert result["none"] is None
    result = two.extended.update(v, keras.ops.add, given, group=False)
    assert isinstance(result, tuple)
    assert [to_numpy(x).tolist() for x in result] == [2.0, 3.0]


@contract(150)
def test_update_of_one_device(api):
    strategy = api.OneDeviceStrategy("cpu:1")
    v = variable(api, strategy, 1.0)
    extended = strategy.extended
    extended.update(v, lambda c, x: c.assign_add(x), (2.0,))
    assert read(v) == 3.0
    result = extended.update(v, lambda c: keras.ops.add(c, 1.0), group=False)
    assert [to_numpy(x).tolist() for x in result] == [4.0]


@contract(150)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_update_of_what_is_combined_on_read(api, two, aggregation):
    v = variable(
        api, two, 1.0, synchronization="on_read", aggregation=aggregation
    )
    two.extended.update(
        v, lambda c, x: c.assign_add(x), (parts(two, [2.0, 4.0]),)
    )
    assert copies(v) == [3.0, 5.0]


@contract(150, native=False)
def test_an_update_that_fails_changes_no_copy(api, two):
    v = variable(api, two, 1.0)
    calls = []

    def fail_on_the_second(component):
        calls.append(component)
        component.assign(9.0)
        if len(calls) == 2:
            raise KeyError("second")

    with refuses(KeyError, v):
        two.extended.update(v, fail_on_the_second)


@contract(151)
def test_other_variables_in_update(api, two):
    v = variable(api, two, [10.0, 11.0], aggregation="mean")
    second = variable(api, two, [1.0, 2.0], aggregation="mean")
    third = variable(api, two, [0.0, 0.0], aggregation="mean")

    def fn(component, x):
        component.assign(x)
        second.assign(keras.ops.multiply(component, 2.0))
        third.assign(keras.ops.multiply(component, 1.5))

    two.extended.update(v, fn, (tensor([1.0, 2.0]),))
    assert copies(v) == [[1.0, 2.0]] * 2
    assert copies(second) == [[2.0, 4.0]] * 2
    assert copies(third) == [[1.5, 3.0]] * 2


@contract(151)
def test_an_update_in_an_update(api, two):
    v, other = (variable(api, two, 1.0, aggregation="mean") for _ in range(2))

    def fn(component):
        two.extended.update(other, lambda c, x: c.assign_add(x), (tensor(5.0),))
        component.assign_add(2.0)

    two.extended.update(v, fn)
    assert copies(v) == [3.0] * 2
    # Once for each copy of the first one.
    assert copies(other) == [11.0] * 2


@contract(152, native=False)
def test_only_own_variables_are_updated(api, two):
    for of in (1.0, None, "v", keras.Variable(1.0)):
        with pytest.raises((TypeError, ValueError), match="variable"):
            two.extended.update(of, lambda component: component)


@contract(153)
def test_update_at_each_location(api, two):
    v = variable(api, two, 1.0)
    locations = two.extended.non_slot_devices([v])
    assert _names(locations) == ("cpu:0", "cpu:1")
    calls = []

    def fn(x, y):
        calls.append(None)
        return keras.ops.add(x, y)

    result = two.extended.update_non_slot(
        locations, fn, (tensor(2.0),), {"y": 1.0}
    )
    assert len(calls) == 2
    assert numbers(result) == [3.0, 3.0]
    result = two.extended.update_non_slot(
        locations, lambda: tensor(3.0), group=False
    )
    assert [to_numpy(x).tolist() for x in result] == [3.0, 3.0]


@contract(153)
def test_update_at_one_location(api):
    strategy = api.OneDeviceStrategy("cpu:1")
    v = variable(api, strategy, 1.0)
    locations = strategy.extended.non_slot_devices([v])
    calls = []
    result = strategy.extended.update_non_slot(
        locations, lambda: calls.append(None) or tensor(3.0)
    )
    assert to_numpy(result).tolist() == 3.0
    assert len(calls) == 1


@contract(154)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_reduce_to_devices(api, mirrored, op):
    """To one, to those of a variable and to those of the value itself."""
    n = mirrored.num_replicas_in_sync
    v = variable(api, mirrored, 1.0)
    value = parts(mirrored, [float(r) for r in range(n)])
    total = n * (n - 1) / 2
    expected = total if op == "SUM" else total / n
    result = mirrored.extended.reduce_to(op.lower(), value, "cpu:1")
    assert numbers(result) == [expected]
    result = mirrored.extended.reduce_to(op, value, v)
    assert repr(result).startswith("Mirrored:{\n")
    assert numbers(result) == [expected] * n
    again = mirrored.extended.reduce_to(op, value, destinations=value)
    assert numbers(again) == numbers(result)


@contract(154, native=False)
def test_reduce_to_a_list_of_devices(api, two):
    result = two.extended.reduce_to(
        "sum", parts(two, [2.0, 4.0]), ["cpu:0", "cpu:1"]
    )
    assert numbers(result) == [6.0, 6.0]


@contract(155)
@pytest.mark.parametrize("op", ["sum", "MEAN"])
def test_reducing_many_is_reducing_each(api, mirrored, op):
    n = mirrored.num_replicas_in_sync
    extended = mirrored.extended
    v = variable(api, mirrored, 1.0)
    rows = variable(api, mirrored, [[1.0], [2.0]])
    pairs = [
        (parts(mirrored, [float(r) for r in range(n)]), v),
        (parts(mirrored, [[[r], [r + 1.0]] for r in range(n)]), rows),
        (parts(mirrored, [1.0] * n), "cpu:0"),
    ]
    results = extended.batch_reduce_to(op, pairs)
    assert isinstance(results, list)
    assert [numbers(result) for result in results] == [
        numbers(extended.reduce_to(op, value, to)) for value, to in pairs
    ]


@contract(156)
def test_broadcast_to(api, mirrored):
    v = variable(api, mirrored, 1.0)
    extended = mirrored.extended
    result = extended.broadcast_to(tensor([1.0, 2.0]), v)
    assert repr(result).startswith("Mirrored:{\n")
    assert numbers(result) == [[1.0, 2.0]] * mirrored.num_replicas_in_sync
    assert numbers(extended.broadcast_to(tensor(2.0), "cpu:1")) == [2.0]
    assert extended.broadcast_to(1.5, v) == 1.5


@contract(157)
@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
def test_the_container_of_a_component(api, two, synchronization):
    v = variable(api, two, 1.0, synchronization=synchronization)
    for component in v.values:
        assert two.extended.value_container(component) is v
    assert two.extended.value_container(v) is v
    plain = raw(api, keras.Variable(1.0))
    assert two.extended.value_container(plain) is plain
    assert two.extended.value_container(1.0) == 1.0


@contract(157)
def test_reading_through_extended(api, two):
    v = variable(api, two, 3.0)
    assert to_numpy(two.extended.read_var(v)).tolist() == 3.0
    total = variable(
        api, two, 1.0, synchronization="on_read", aggregation="sum"
    )
    assert to_numpy(two.extended.read_var(total)).tolist() == 2.0


@contract(160)
def test_arguments_for_each_replica(api, two):
    result = two.extended.call_for_each_replica(
        lambda x, scale: x * scale,
        args=(parts(two, [1.0, 2.0]),),
        kwargs={"scale": 3.0},
    )
    assert numbers(result) == [3.0, 6.0]
