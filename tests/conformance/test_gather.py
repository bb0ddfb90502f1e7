"""`gather` and `all_gather`."""

import keras
import numpy as np
import pytest

from conformance.contract import contract
from conformance.helpers import BACKEND
from conformance.helpers import compiled
from conformance.helpers import gradients
from conformance.helpers import numbers
from conformance.helpers import per_replica
from conformance.helpers import replica_id
from conformance.helpers import runs_compiled
from conformance.helpers import sparse
from conformance.helpers import tensor
from conformance.helpers import to_numpy

AXES = [
    ([1.0, 2.0], 0),
    ([[1.0, 2.0], [3.0, 4.0]], 0),
    ([[1.0, 2.0], [3.0, 4.0]], 1),
    ([[[1.0, 2.0]], [[3.0, 4.0]]], 0),
    ([[[1.0, 2.0]], [[3.0, 4.0]]], 1),
    ([[[1.0, 2.0]], [[3.0, 4.0]]], 2),
]


def all_gather(api, strategy, value, axis):
    """What each replica sees after `all_gather`."""
    return strategy.run(
        lambda x: api.get_replica_context().all_gather(x, axis=axis),
        args=(value,),
    )


def ones(*shapes):
    """A value function: ones, of a shape for each replica."""
    return lambda i: tensor(np.ones(shapes[i]))


def assert_gathered(api, strategy, value, axis, expected):
    """By `gather`, and by `all_gather` on each replica."""
    count = strategy.num_replicas_in_sync
    expected = np.asarray(expected).tolist()
    assert numbers(strategy.gather(value, axis=axis)) == [expected]
    assert numbers(all_gather(api, strategy, value, axis)) == [expected] * count


@contract(69, 81)
@pytest.mark.parametrize("rows, axis", AXES)
def test_equal_shapes_are_concatenated(api, strategy, rows, axis):
    value = strategy.run(lambda: tensor(rows))
    copies = [np.array(rows)] * strategy.num_replicas_in_sync
    expected = np.concatenate(copies, axis)
    assert_gathered(api, strategy, value, axis, expected)


@contract(69)
@runs_compiled
def test_gathering_while_compiled(api, strategy):
    def fn():
        value = strategy.run(lambda: tensor([1.0, 2.0]))
        return strategy.gather(value, axis=0)

    expected = [1.0, 2.0] * strategy.num_replicas_in_sync
    assert to_numpy(compiled(fn)()).tolist() == expected


@contract(70, 81)
@pytest.mark.parametrize("axis", [0, 1])
def test_rows_may_differ_along_the_axis(api, mirrored, axis):
    count = mirrored.num_replicas_in_sync
    shape = (lambda n: (n, 1)) if axis == 0 else (lambda n: (1, n))
    value = per_replica(
        mirrored, lambda i: tensor(np.full(shape(i + 1), float(i)))
    )
    flat = [float(i) for i in range(count) for _ in range(i + 1)]
    expected = np.reshape(flat, shape(len(flat)))
    assert_gathered(api, mirrored, value, axis, expected)


WRONG = {
    "size": (ones((1, 1), (1, 2)), r"\(1, 1\).*\(1, 2\)"),
    "rank": (ones((1, 1), (1,)), r"\(1, 1\).*\(1,\)"),
}


@contract(71, 72, 80, native=False)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_and_forgotten(api, two, wrong):
    value_fn, shapes = WRONG[wrong]
    value = per_replica(two, value_fn)
    right = per_replica(two, lambda i: tensor([float(i)]))
    for _ in range(2):
        with pytest.raises(ValueError, match=shapes):
            two.gather(value, axis=0)
        assert numbers(two.gather(right, axis=0)) == [[0.0, 1.0]]
        with pytest.raises(ValueError, match=shapes):
            all_gather(api, two, value, 0)
        assert numbers(all_gather(api, two, right, 0)) == [[0.0, 1.0]] * 2
        (reduced,) = two.extended.batch_reduce_to("SUM", [(right, "cpu:0")])
        assert numbers(reduced) == [[1.0]]


@contract(73)
def test_sparse_rows_are_refused(api, mirrored):
    with pytest.raises(NotImplementedError, match="gather does not support"):
        mirrored.gather(sparse([[1.0, 0.0]]), axis=0)
    value = mirrored.run(lambda: sparse([[1.0, 0.0]]))
    with pytest.raises(
        NotImplementedError, match="all_gather does not support"
    ):
        all_gather(api, mirrored, value, 0)


@contract(73, native=False)
def test_sparse_rows_of_replicas_are_refused(api, mirrored):
    value = mirrored.run(lambda: sparse([[1.0, 0.0]]))
    with pytest.raises(NotImplementedError, match="gather does not support"):
        mirrored.gather(value, axis=0)


@contract(74)
def test_gather_in_a_replica_points_to_all_gather(api, scoped):
    with pytest.raises(RuntimeError, match="all_gather"):
        scoped.run(lambda: scoped.gather(tensor([1.0]), axis=0))


@contract(75)
def test_a_plain_tensor_comes_back(api, strategy):
    gathered = strategy.gather(tensor([1.0, 2.0]), axis=0)
    assert numbers(gathered) == [[1.0, 2.0]]


@contract(75, native=False)
@pytest.mark.parametrize("axis", [1, -2])
def test_an_axis_beyond_the_rank_is_refused(api, strategy, axis):
    with pytest.raises(ValueError, match="axis"):
        strategy.gather(tensor([1.0, 2.0]), axis=axis)
    value = strategy.run(lambda: tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="axis"):
        strategy.gather(value, axis=axis)
    with pytest.raises(ValueError, match="axis"):
        all_gather(api, strategy, value, axis)


@contract(76, native=False)
def test_scalars_are_refused(api, mirrored):
    value = mirrored.run(lambda: tensor(1.0))
    with pytest.raises(ValueError, match="scalar|rank|dimension"):
        mirrored.gather(value, axis=0)
    with pytest.raises(ValueError, match="scalar|rank|dimension"):
        all_gather(api, mirrored, value, 0)


@contract(77, native=False)
@pytest.mark.parametrize("axis", [-1, -2])
def test_axes_may_be_negative(api, strategy, axis):
    copies = [[[1.0, 2.0]]] * strategy.num_replicas_in_sync
    value = strategy.run(lambda: tensor([[1.0, 2.0]]))
    expected = np.concatenate(copies, axis)
    assert_gathered(api, strategy, value, axis, expected)


DTYPES = ["float16", "float32", "int32"]
MORE_DTYPES = ["bool", "uint8", "int8", "int16", "bfloat16", "complex64"]


@contract(78)
@pytest.mark.parametrize("dtype", DTYPES)
def test_common_dtypes(api, strategy, dtype):
    value = strategy.run(lambda: tensor([0, 1], dtype))
    gathered = strategy.gather(value, axis=0)
    assert keras.backend.standardize_dtype(gathered.dtype) == dtype
    assert keras.ops.cast(gathered, "float32").shape == (
        2 * strategy.num_replicas_in_sync,
    )


@contract(78, native=False)
@pytest.mark.parametrize("dtype", MORE_DTYPES)
def test_all_other_dtypes(api, strategy, dtype):
    count = strategy.num_replicas_in_sync
    value = strategy.run(lambda: tensor([0, 1], dtype))
    for gathered in (
        strategy.gather(value, axis=0),
        *strategy.experimental_local_results(
            all_gather(api, strategy, value, 0)
        ),
    ):
        assert keras.backend.standardize_dtype(gathered.dtype) == dtype
        seen = to_numpy(gathered).astype("complex64")
        assert seen.tolist() == [0, 1] * count


@contract(78, native=False)
@pytest.mark.skipif(
    BACKEND != "tensorflow", reason="this backend's tensors hold no strings"
)
def test_strings(api, two):
    value = per_replica(two, lambda i: tensor([f"row {i}"], "string"))
    gathered = to_numpy(two.gather(value, axis=0)).tolist()
    assert gathered == [b"row 0", b"row 1"]


@contract(79, native=False)
def test_a_nest_is_gathered_leaf_by_leaf(api, strategy):
    count = strategy.num_replicas_in_sync
    value = strategy.run(
        lambda: {"a": tensor([1.0]), "b": [(tensor([[2.0, 3.0]]),)]}
    )
    gathered = strategy.gather(value, axis=0)
    assert numbers(gathered["a"]) == [[1.0] * count]
    assert type(gathered["b"][0]) is tuple
    assert numbers(gathered["b"][0][0]) == [[[2.0, 3.0]] * count]


@contract(81)
def test_all_gather_nested_lists(api, mirrored):
    count = mirrored.num_replicas_in_sync
    value = per_replica(mirrored, lambda i: tensor([float(i)]))
    result = mirrored.run(
        lambda x: api.get_replica_context().all_gather([x, [x + 1]], axis=0),
        args=(value,),
    )
    ids = [float(i) for i in range(count)]
    assert numbers(result[0]) == [ids] * count
    assert numbers(result[1][0]) == [[i + 1 for i in ids]] * count


@contract(82)
@pytest.mark.parametrize("axis", [0, 1])
def test_gradient_of_all_gather(api, strategy, axis):
    count = strategy.num_replicas_in_sync

    def fn():
        context = api.get_replica_context()
        upstream = replica_id(api) + 1.0

        def loss(x):
            gathered = context.all_gather(x, axis=axis)
            return keras.ops.sum(gathered * upstream)

        _, (gradient,) = gradients(loss, [tensor([[1.0, 2.0]])])
        return gradient

    summed = count * (count + 1) / 2
    assert numbers(strategy.run(fn)) == [[[summed, summed]]] * count


@contract(82)
def test_gradient_of_all_gather_of_ragged_rows(api, two):
    def fn():
        context = api.get_replica_context()
        rows = replica_id(api) + 1
        weights = tensor([[1.0], [10.0], [100.0]]) * rows

        def loss(x):
            return keras.ops.sum(context.all_gather(x, axis=0) * weights)

        _, (gradient,) = gradients(loss, [tensor(np.ones((rows, 1)))])
        return gradient

    assert numbers(two.run(fn)) == [[[3.0]], [[30.0], [300.0]]]


@contract(82)
@pytest.mark.parametrize("second", [[2.0], [[2.0, 3.0]]])
def test_gradient_of_all_gather_of_a_nest(api, strategy, second):
    """Of replica r's (r + 1) * (first + 2 * second)."""

    def fn():
        context = api.get_replica_context()
        upstream = replica_id(api) + 1.0

        def loss(x, y):
            gathered = context.all_gather([x, y], axis=0)
            return sum(
                keras.ops.sum(part * upstream * factor)
                for part, factor in zip(gathered, (1.0, 2.0), strict=True)
            )

        return gradients(loss, [tensor([1.0]), tensor(second)])[1]

    seen = strategy.run(fn)
    count = strategy.num_replicas_in_sync
    summed = count * (count + 1) / 2
    assert numbers(seen[0]) == [[summed]] * count
    expected = np.full(np.shape(second), 2 * summed).tolist()
    assert numbers(seen[1]) == [expected] * count


@contract(83)
def test_alone_collectives_return_the_value(api):
    context = api.get_replica_context()
    value = tensor([1.0, 2.0])
    assert numbers(context.all_gather(value, axis=0)) == [[1.0, 2.0]]
    assert numbers(context.all_reduce("SUM", value)) == [[1.0, 2.0]]
    assert numbers(context.all_reduce("MEAN", value)) == [[1.0, 2.0]]
