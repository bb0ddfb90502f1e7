"""`gather` and `all_gather` join the rows of all replicas along an axis."""

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


def all_gather(api, strategy, value, axis):
    """What each replica sees after `all_gather`."""
    return strategy.run(
        lambda x: api.get_replica_context().all_gather(x, axis=axis),
        args=(value,),
    )


def ones(*shapes):
    """A value function: ones, of a shape for each replica."""
    return lambda i: tensor(np.ones(shapes[i]))


@contract(69)
@runs_compiled
def test_gathering_while_compiled(api, strategy):
    def fn():
        value = strategy.run(lambda: tensor([1.0, 2.0]))
        return strategy.gather(value, axis=0)

    expected = [1.0, 2.0] * strategy.num_replicas_in_sync
    assert to_numpy(compiled(fn)()).tolist() == expected


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


@contract(73, native=False)
def test_sparse_rows_are_refused(api, mirrored):
    each = mirrored.run(lambda: sparse([[1.0, 0.0]]))
    for value in (sparse([[1.0, 0.0]]), each):
        with pytest.raises(NotImplementedError, match="gather does not supp"):
            mirrored.gather(value, axis=0)
    with pytest.raises(NotImplementedError, match="all_gather does not supp"):
        all_gather(api, mirrored, each, 0)


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


DTYPES = ["float16", "float32", "int32", "bool", "uint8", "int8", "int16"]
DTYPES += ["bfloat16", "complex64"]


@contract(78, native=False)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_dtypes(api, strategy, dtype):
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


# The original stacks the gradients of a nest, which need one shape for that.
@contract(82, native=False)
@pytest.mark.parametrize(
    "second, axis", [([2.0], 0), ([[2.0, 3.0]], 0), ([[2.0, 3.0]], -1)]
)
def test_gradient_of_all_gather_of_a_nest(api, strategy, second, axis):
    """Of replica r's (r + 1) * (first + 2 * second)."""

    def fn():
        context = api.get_replica_context()
        upstream = replica_id(api) + 1.0

        def loss(x, y):
            gathered = context.all_gather([x, y], axis=axis)
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
