"""`Strategy.reduce` combines the values of all replicas, and along axes."""

import keras
import numpy as np
import pytest

from conformance.contract import contract
from conformance.helpers import compiled
from conformance.helpers import distribute
from conformance.helpers import numbers
from conformance.helpers import per_replica
from conformance.helpers import raw
from conformance.helpers import replica_id
from conformance.helpers import runs_compiled
from conformance.helpers import tensor
from conformance.helpers import to_numpy


def ragged(strategy):
    """Replica r has r + 1 rows of r."""
    return per_replica(strategy, lambda r: tensor(np.full((r + 1,), r)))


@contract(49)
def test_sum_of_ones_is_the_number_of_replicas(api, strategy):
    count = strategy.num_replicas_in_sync
    ones = strategy.run(lambda: tensor(1.0))
    assert to_numpy(strategy.reduce("SUM", ones, axis=None)) == count
    if strategy is not api.get_strategy():
        with strategy.scope():
            ones = strategy.run(lambda: tensor(1.0))
            total = strategy.reduce(api.ReduceOp.SUM, ones, axis=None)
        assert to_numpy(total) == count


@contract(49)
@runs_compiled
def test_a_compiled_sum_of_ones(api, strategy):
    def fn():
        ones = strategy.run(lambda: tensor(1.0))
        return strategy.reduce("SUM", ones, axis=None)

    assert to_numpy(compiled(fn)()) == strategy.num_replicas_in_sync


@contract(54)
def test_a_distributed_batch_of_three_rows(api, two):
    (batch,) = distribute(api, two, [5.0, 6.0, 7.0])
    assert to_numpy(two.reduce("MEAN", batch, axis=0)) == 6.0
    (batch,) = distribute(api, two, [[1.0, 1.0]] * 3)
    assert numbers(two.reduce("MEAN", batch, axis=0)) == [[1.0, 1.0]]


@contract(55, native=False)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_without_an_axis_shapes_are_equal(api, mirrored, op):
    with pytest.raises(ValueError, match=r"(?s)\(1,\).*\(2,\)"):
        mirrored.reduce(op, ragged(mirrored), axis=None)
    ones = mirrored.run(lambda: tensor(1.0))
    total = mirrored.reduce("SUM", ones, axis=None)
    assert to_numpy(total) == mirrored.num_replicas_in_sync


@contract(56)
def test_without_an_axis_replicas_are_added_elementwise(api, mirrored):
    """And a mean of integers is a true division."""
    count = mirrored.num_replicas_in_sync
    ids = count * (count - 1) / 2
    floats = per_replica(mirrored, lambda i: tensor([[i, 2.0 * i]]))
    integers = per_replica(mirrored, lambda i: tensor([[i, 2 * i]], "int32"))
    for value in (floats, integers):
        total = mirrored.reduce("SUM", value, axis=None)
        assert numbers(total) == [[[ids, 2 * ids]]]
        mean = mirrored.reduce("MEAN", value, axis=None)
        assert numbers(mean) == [[[ids / count, 2 * ids / count]]]


@contract(57)
def test_a_nest_without_an_axis(api, strategy):
    result = strategy.run(lambda x: (x + 1, x - 1), args=(tensor(3.0),))
    total = strategy.reduce("SUM", result, axis=None)
    count = strategy.num_replicas_in_sync
    assert type(total) is tuple
    assert to_numpy(total) == (4.0 * count, 2.0 * count)


@contract(59)
@pytest.mark.parametrize("name", ["sum", "SUM", "Sum", "mean", "MEAN"])
def test_operations_by_their_names(api, two, name):
    value = two.run(lambda: tensor([1.0 + 2 * replica_id(api)]))
    expected = 4.0 if name.lower() == "sum" else 2.0
    assert to_numpy(two.reduce(name, value, axis=None)) == [expected]
    assert to_numpy(two.reduce(name, value, axis=0)) == expected
    reduced = two.extended.reduce_to(name, value, destinations="cpu:0")
    assert numbers(reduced) == [[expected]]
    (reduced,) = two.extended.batch_reduce_to(name, [(value, "cpu:1")])
    assert numbers(reduced) == [[expected]]


@contract(60, 62)
def test_an_unknown_name_and_no_axis_are_refused(api, strategy):
    value = strategy.run(lambda: tensor([1.0]))
    for axis in (None, 0):
        with pytest.raises(
            ValueError, match="(?s)MEDIAN.* is not a valid Reduce"
        ):
            strategy.reduce("MEDIAN", value, axis=axis)
    with pytest.raises(TypeError, match="axis"):
        strategy.reduce("SUM", 1.0)


@contract(61, native=False)
@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("wrong", [1, None, sum])
def test_what_is_no_operation_is_refused(api, strategy, axis, wrong):
    value = strategy.run(lambda: tensor([1.0]))
    with pytest.raises(TypeError, match="Expected `reduce_op` to be a"):
        strategy.reduce(wrong, value, axis=axis)


@contract(62)
def test_the_old_reduce_needs_no_axis(api):
    old = api.compat.v1.MirroredStrategy(["cpu:0", "cpu:1"])
    value = old.run(lambda: tensor([1.0]))
    assert numbers(old.reduce("SUM", value)) == [[2.0]]


@contract(63)
def test_the_mean_of_what_is_equal_on_the_replicas(api, mirrored):
    with mirrored.scope():
        variable = raw(api, keras.Variable([2.0, 3.0]))
    mean = mirrored.reduce("MEAN", tensor([4.0, 5.0]), axis=None)
    assert numbers(mean) == [[4.0, 5.0]]
    mean = mirrored.reduce("MEAN", variable, axis=None)
    assert to_numpy(keras.ops.convert_to_tensor(mean)).tolist() == [2.0, 3.0]


@contract(63)
def test_the_sum_of_a_plain_value_is_ambiguous(api, mirrored):
    fragment = "cannot be reduced with the given reduce op"
    with pytest.raises(ValueError, match=fragment):
        mirrored.reduce("SUM", tensor(1.0), axis=None)
    zero = mirrored.reduce("SUM", np.zeros(()), axis=None)
    assert to_numpy(zero) == 0.0


@contract(63, 64, native=False)
def test_any_zero_can_be_added_and_no_mirrored_variable(api, mirrored):
    for zero in (0, 0.0, np.zeros((), "int32")):
        assert to_numpy(mirrored.reduce("SUM", zero, axis=None)) == 0
    with mirrored.scope():
        variable = keras.Variable(2.0)
    with pytest.raises(ValueError, match="reduce"):
        mirrored.reduce("SUM", variable, axis=None)


@contract(64)
@pytest.mark.parametrize("aggregation", ["sum", "mean"])
def test_the_sum_of_an_on_read_variable(api, mirrored, aggregation):
    with mirrored.scope():
        variable = keras.Variable(
            0.0,
            trainable=False,
            synchronization="on_read",
            aggregation=aggregation,
        )
    mirrored.run(lambda: variable.assign(tensor(1.0 + replica_id(api))))
    count = mirrored.num_replicas_in_sync
    total = mirrored.reduce("SUM", raw(api, variable), axis=None)
    assert to_numpy(total) == count * (count + 1) / 2


@contract(50, 65)
@pytest.mark.parametrize("axis", [0, 1, -1, -2, (0, 1), (0, -1)])
def test_axes_may_be_negative_or_several(api, strategy, axis):
    rows = np.array([[1.0, 2.0], [3.0, 4.0]])
    value = strategy.run(lambda: tensor(rows))
    total = to_numpy(strategy.reduce("SUM", value, axis=axis))
    mean = to_numpy(strategy.reduce("MEAN", value, axis=axis))
    count = strategy.num_replicas_in_sync
    np.testing.assert_array_equal(total, rows.sum(axis) * count)
    np.testing.assert_array_equal(mean, rows.mean(axis))


@contract(65, native=False)
@pytest.mark.parametrize("op, total", [("SUM", 10.0), ("MEAN", 2.5)])
def test_axes_may_be_a_list(api, strategy, op, total):
    value = strategy.run(lambda: tensor([[1.0, 2.0], [3.0, 4.0]]))
    reduced = to_numpy(strategy.reduce(op, value, axis=[0, 1]))
    count = strategy.num_replicas_in_sync if op == "SUM" else 1
    assert reduced == total * count


@contract(65, native=False)
@pytest.mark.parametrize("axis", [1, -2, (0, 1), [3]])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_axes_beyond_the_rank_are_refused(api, strategy, op, axis):
    value = strategy.run(lambda: tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="axis|axes|dimension"):
        strategy.reduce(op, value, axis=axis)
    assert to_numpy(strategy.reduce("MEAN", value, axis=0)) == 1.5


@contract(66)
def test_one_replica_reduces_along_the_axis_only(api, single):
    value = tensor([[1.0, 2.0], [3.0, 5.0]])
    for op in ("SUM", "MEAN"):
        same = single.reduce(op, value, axis=None)
        assert numbers(same) == [[[1.0, 2.0], [3.0, 5.0]]]
    assert numbers(single.reduce("SUM", value, axis=0)) == [[4.0, 7.0]]
    assert numbers(single.reduce("MEAN", value, axis=1)) == [[1.5, 4.0]]


@contract(66, native=False)
def test_one_replica_refuses_the_components_of_two(api, single, two):
    value = per_replica(two, lambda i: tensor(float(i)))
    for op in ("SUM", "MEAN"):
        with pytest.raises(ValueError, match="Received: 2 components"):
            single.reduce(op, value, axis=None)


@contract(68)
def test_reducing_each_batch_of_a_dataset(api, strategy):
    product = 2.0
    for batch in distribute(api, strategy, [5.0, 6.0], [7.0, 8.0]):
        product *= float(strategy.reduce("MEAN", batch, axis=0))
    assert product == 2 * 5.5 * 7.5


@contract(51, native=False)
@pytest.mark.parametrize(
    ("op", "elementwise", "along"),
    [
        ("MIN", [1.0, 2.0], 1.0),
        ("MAX", [4.0, 3.0], 4.0),
        ("PROD", [4.0, 6.0], 24.0),
    ],
)
def test_other_operations(api, two, op, elementwise, along):
    rows = [[1.0, 3.0], [4.0, 2.0]]
    value = per_replica(two, lambda i: tensor(rows[i]))
    op = api.ReduceOp[op]
    assert numbers(two.reduce(op, value, axis=None)) == [elementwise]
    assert numbers(two.reduce(op, value, axis=0)) == [along]
