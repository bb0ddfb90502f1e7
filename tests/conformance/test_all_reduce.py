"""`all_reduce` gives each replica the combined value, and its gradient."""

import keras
import numpy as np
import pytest

import keras_dist
from conformance.contract import contract
from conformance.helpers import BACKEND
from conformance.helpers import dense
from conformance.helpers import gradients
from conformance.helpers import numbers
from conformance.helpers import per_replica
from conformance.helpers import raw
from conformance.helpers import replica_id
from conformance.helpers import sparse
from conformance.helpers import tensor
from conformance.helpers import to_numpy


def all_reduce(api, strategy, op, value):
    """What each replica sees after `all_reduce`."""
    return strategy.run(
        lambda x: api.get_replica_context().all_reduce(op, x), args=(value,)
    )


@contract(84, native=False)
def test_sum_of_ones(api, strategy):
    """Each replica's own, or one tensor that all replicas share."""
    count = strategy.num_replicas_in_sync
    shared = tensor(1.0)
    for op in ("SUM", api.ReduceOp.SUM):
        for make in (lambda: tensor(1.0), lambda: shared):
            seen = strategy.run(
                lambda op=op, make=make: api.get_replica_context().all_reduce(
                    op, make()
                )
            )
            assert numbers(seen) == [float(count)] * count


@contract(85)
@pytest.mark.parametrize(
    "op, scalar, rows",
    [("SUM", 4.0, [42.0, 43.0]), ("MEAN", 2.0, [21.0, 21.5])],
)
def test_a_nest_on_two_replicas(api, two, op, scalar, rows):
    def fn():
        second = replica_id(api)
        x = tensor([1.0, 3.0][second])
        y = tensor([[39.0, 2.0], [3.0, 41.0]][second])
        return api.get_replica_context().all_reduce(op, (x, y))

    x, y = two.run(fn)
    assert numbers(x) == [scalar] * 2
    assert numbers(y) == [rows] * 2


@contract(86)
@pytest.mark.parametrize("op, gradient", [("SUM", 4.0), ("MEAN", 2.0)])
def test_the_gradient_is_the_same_reduction(api, two, op, gradient):
    def fn():
        context = api.get_replica_context()
        upstream = [1.0, 3.0][replica_id(api)]
        _, (seen,) = gradients(
            lambda x: context.all_reduce(op, x) * upstream, [tensor(5.0)]
        )
        return seen

    assert numbers(two.run(fn)) == [gradient] * 2


@contract(85, 86)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_one_replica_gets_the_nest_and_its_gradient_back(api, single, op):
    x, y = all_reduce(api, single, op, (tensor(1.0), tensor([39.0, 2.0])))
    assert (numbers(x), numbers(y)) == ([1.0], [[39.0, 2.0]])

    def fn():
        context = api.get_replica_context()
        _, (seen,) = gradients(
            lambda x: context.all_reduce(op, x) * 3.0, [tensor(5.0)]
        )
        return seen

    assert numbers(single.run(fn)) == [3.0]


@contract(86, 87)
def test_deep_nests_and_their_gradients(api, mirrored):
    count = mirrored.num_replicas_in_sync
    value = per_replica(mirrored, lambda i: tensor(float(i)))

    def fn(own):
        context = api.get_replica_context()
        upstream = replica_id(api) + 1.0

        def loss(x, y):
            nest = (x, (x + 1, [y], {"double": 2 * x}))
            first, (_, (second,), _) = context.all_reduce("SUM", nest)
            return (first + 10.0 * keras.ops.sum(second)) * upstream

        _, slopes = gradients(loss, [own, tensor([2.0, 3.0])])
        return context.all_reduce("SUM", (own, (own + 1, [own]))), slopes

    (a, (b, (c,))), (x, y) = mirrored.run(fn, args=(value,))
    ids = count * (count - 1) / 2
    assert numbers(a) == numbers(c) == [ids] * count
    assert numbers(b) == [ids + count] * count
    summed = count * (count + 1) / 2
    assert numbers(x) == [summed] * count
    assert numbers(y) == [[10 * summed, 10 * summed]] * count


@contract(89)
@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
def test_an_on_read_variable_gives_each_replicas_value(
    api, mirrored, aggregation
):
    with mirrored.scope():
        variable = keras.Variable(
            0.0,
            trainable=False,
            synchronization="on_read",
            aggregation=aggregation,
        )

    def fn():
        variable.assign(tensor(3.0 * replica_id(api)))
        context = api.get_replica_context()
        return context.all_reduce("SUM", raw(api, variable))

    count = mirrored.num_replicas_in_sync
    expected = 3.0 * count * (count - 1) / 2
    assert numbers(mirrored.run(fn)) == [expected] * count


@contract(90)
def test_a_mirrored_variable(api, mirrored):
    with mirrored.scope():
        variable = keras.Variable(2.0)
    count = mirrored.num_replicas_in_sync
    seen = all_reduce(api, mirrored, "SUM", raw(api, variable))
    assert numbers(seen) == [2.0 * count] * count


@contract(91)
def test_an_unknown_name_is_refused(api, mirrored):
    with pytest.raises(
        ValueError, match="(?s)MEDIAN.* is not a valid ReduceOp"
    ):
        all_reduce(api, mirrored, "MEDIAN", tensor(1.0))
    assert not api.has_strategy()


@contract(91, native=False)
def test_shapes_that_differ_are_refused(api, two):
    value = per_replica(two, lambda i: tensor([1.0] * (i + 1)))
    with pytest.raises(ValueError, match=r"(?s)\(1,\).*\(2,\)"):
        all_reduce(api, two, "SUM", value)
    assert numbers(all_reduce(api, two, "SUM", tensor(1.0))) == [2.0, 2.0]


@contract(92)
@pytest.mark.parametrize(
    "method, expected",
    [("assign", 1.0), ("assign_add", 8.0), ("assign_sub", 2.0)],
)
def test_updates_in_a_replica(api, strategy, method, expected):
    with strategy.scope():
        variable = keras.Variable(5.0, aggregation="mean")

    def fn():
        getattr(variable, method)(tensor(2.0))
        getattr(variable, method)(1.0)

    strategy.run(fn)
    parts = strategy.experimental_local_results(raw(api, variable))
    assert [*map(to_numpy, parts)] == [expected] * len(parts)


@contract(87, 88, native=False)
@pytest.mark.skipif(
    BACKEND != "tensorflow", reason="only TensorFlow has IndexedSlices"
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("ops_class", [None, "ReductionToOneDevice"])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_slices_are_reduced_and_stay_sparse(api, op, ops_class, compiled):
    import tensorflow as tf

    chosen = ops_class and getattr(api, ops_class)()
    cpus = ["cpu:0", "cpu:1"]
    strategy = api.MirroredStrategy(cpus, cross_device_ops=chosen)
    offset = per_replica(strategy, lambda i: tensor(float(i)))

    def fn(offset):
        # Row 1 twice: slices of one index add up.
        slices = tf.IndexedSlices(
            tf.ones((3, 2)) + offset,
            tf.constant([0, 1, 1]),
            tf.constant([4, 2]),
        )
        nest = (slices, [offset, {"again": slices}])
        reduced, [total, rest] = api.get_replica_context().all_reduce(op, nest)
        assert isinstance(reduced, tf.IndexedSlices)
        return dense(reduced), total, dense(rest["again"])

    if compiled:
        fn = keras_dist.function(fn)
    first, total, second = strategy.run(fn, args=(offset,))
    factor = 1.0 if op == "SUM" else 0.5
    expected = [[3.0, 3.0], [6.0, 6.0], [0.0, 0.0], [0.0, 0.0]]
    expected = (factor * np.array(expected)).tolist()
    assert numbers(first) == numbers(second) == [expected] * 2
    assert numbers(total) == [factor] * 2


@contract(88, native=False)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_sparse_values_are_reduced_when_made_dense(api, mirrored, op):
    rows = [[1.0, 0.0], [0.0, 2.0]]
    if BACKEND != "tensorflow":
        fragment = "(?s)all_reduce does not support.*dense"
        with pytest.raises(NotImplementedError, match=fragment):
            mirrored.run(
                lambda: api.get_replica_context().all_reduce(op, sparse(rows))
            )
    seen = mirrored.run(
        lambda: api.get_replica_context().all_reduce(op, dense(sparse(rows)))
    )
    count = mirrored.num_replicas_in_sync
    factor = count if op == "SUM" else 1
    assert numbers(seen) == [[[factor, 0.0], [0.0, 2.0 * factor]]] * count
