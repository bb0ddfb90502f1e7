"""`run` calls a function on each replica, and puts its results together."""

import collections
import traceback

import keras
import numpy as np
import pytest

from conformance.contract import contract
from conformance.helpers import compiled
from conformance.helpers import distribute
from conformance.helpers import is_distributed
from conformance.helpers import local
from conformance.helpers import numbers
from conformance.helpers import per_replica
from conformance.helpers import raw
from conformance.helpers import replica_id
from conformance.helpers import runs_compiled
from conformance.helpers import tensor
from conformance.helpers import to_numpy

Point = collections.namedtuple("Point", "x y")


@contract(23, 24)
def test_a_chain_of_runs(api, strategy):
    ids = range(strategy.num_replicas_in_sync)
    first = strategy.run(lambda: replica_id(api) + 1)
    assert numbers(first) == [i + 1 for i in ids]
    second = strategy.run(lambda x: {"a": 2 * x, "b": x * x}, args=(first,))
    third = strategy.run(lambda a, b: a + 2 * b + 2, kwargs=second)
    expected = [2 * (i + 1) + 2 * (i + 1) ** 2 + 2 for i in ids]
    assert numbers(third) == expected


@contract(25)
def test_a_plain_argument_goes_to_every_replica(api, strategy):
    seen = []
    result = strategy.run(lambda x: seen.append(x) or x**2, args=(2.0,))
    assert seen == [2.0] * strategy.num_replicas_in_sync
    results = strategy.experimental_local_results(result)
    assert set(map(float, results)) == {4.0}


@contract(26)
def test_each_replica_gets_its_part_of_nested_arguments(api, mirrored):
    value = per_replica(mirrored, lambda i: tensor(10.0 * i))

    def fn(nest, offset):
        ((x,), same), y = nest["a"], offset["b"][0]
        return x + y + same

    result = mirrored.run(
        fn,
        args=({"a": ([value], 1.0)},),
        kwargs={"offset": {"b": [value]}},
    )
    count = mirrored.num_replicas_in_sync
    assert numbers(result) == [20.0 * i + 1 for i in range(count)]


@contract(27)
def test_a_variable_is_passed_and_returned_as_itself(api, strategy):
    with strategy.scope():
        variable = keras.Variable(3.0)
    seen = []
    result = strategy.run(lambda v: seen.append(v) or v, args=(variable,))
    assert result is variable
    assert all(v is variable for v in seen)
    assert strategy.run(lambda: variable) is variable


@contract(28)
@pytest.mark.parametrize("args", [1.0, "ab", {"a": 1}])
def test_args_are_a_list_or_a_tuple(api, strategy, args):
    fragment = "positional args must be a list or tuple"
    with pytest.raises(ValueError, match=fragment):
        strategy.run(lambda *args: None, args=args)
    assert strategy.run(lambda x: None, args=[1.0]) is None


@contract(29)
def test_results_keep_their_containers(api, mirrored):
    def fn():
        x = tensor(float(replica_id(api)))
        return {
            "list": [x, (x,)],
            "point": Point(x, [x]),
            "ordered": collections.OrderedDict(b=x, a=x),
            "empty": [(), {}],
        }

    result = mirrored.run(fn)
    ids = [float(i) for i in range(mirrored.num_replicas_in_sync)]
    assert list(result) == ["list", "point", "ordered", "empty"]
    assert type(result["list"]) is list
    assert type(result["list"][1]) is tuple
    assert type(result["point"]) is Point
    assert type(result["point"].y) is list
    assert type(result["ordered"]) is collections.OrderedDict
    assert list(result["ordered"]) == ["b", "a"]
    assert result["empty"] == [(), {}]
    for leaf in (
        result["list"][0],
        result["list"][1][0],
        result["point"].x,
        result["point"].y[0],
        result["ordered"]["a"],
    ):
        assert is_distributed(leaf)
        assert numbers(leaf) == ids


@contract(30)
def test_the_same_object_comes_back_unwrapped(api, mirrored):
    captured = tensor([1.0, 2.0])
    marker = object()
    result = mirrored.run(lambda: [4.0, None, captured, marker, "text"])
    assert result[:2] == [4.0, None]
    assert result[2] is captured
    assert result[3] is marker
    assert result[4] == "text"


@contract(30)
def test_equal_leaves_are_still_one_a_replica(api, mirrored):
    result = mirrored.run(lambda: [tensor(1.0), float("1.5"), object()])
    count = mirrored.num_replicas_in_sync
    assert isinstance(result[0], api.PerReplica)
    assert numbers(result[0]) == [1.0] * count
    assert isinstance(result[1], api.PerReplica)
    assert result[1].values == (1.5,) * count
    assert len(set(result[2].values)) == count


@contract(31, native=False)
@pytest.mark.parametrize(
    "results, path",
    [
        (({"a": [1, 2]}, {"a": [1, 2, 3]}), "a"),
        (({"inner": 1.5}, {"other": 1.5}), "inner|other"),
        (({"a": {"deep": [1.5]}}, {"a": {"deep": (1.5,)}}), "deep"),
        (([1.5, [2.5]], [1.5, 2.5]), "1"),
    ],
)
def test_replicas_with_different_results_are_named(api, two, results, path):
    with pytest.raises(ValueError, match="[Rr]eplica 1") as raised:
        two.run(lambda: results[replica_id(api)])
    with pytest.raises(ValueError, match=path):
        raise raised.value
    assert numbers(two.run(lambda: tensor(replica_id(api)))) == [0, 1]


@contract(32)
def test_leaves_may_have_different_types(api, two):
    result = two.run(lambda: tensor(1.0) if replica_id(api) == 0 else 7)
    assert is_distributed(result)
    assert keras.ops.is_tensor(result.values[0])
    assert float(result.values[0]) == 1.0
    assert result.values[1] == 7


@contract(33)
def test_components_of_a_variable_come_back_as_the_variable(api, mirrored):
    with mirrored.scope():
        variable = raw(api, keras.Variable(3.0))
    parts = api.PerReplica(mirrored.experimental_local_results(variable))
    assert mirrored.run(lambda part: part, args=(parts,)) is variable


@contract(34)
def test_updates_happen_though_the_result_is_not_used(api, strategy):
    with strategy.scope():
        variable = keras.Variable(0.0, aggregation="mean")

    def fn():
        variable.assign(1.0)

    assert strategy.run(fn) is None
    assert to_numpy(variable) == 1.0


def _fail(*args):
    raise KeyError("from a replica")


@contract(35)
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_an_exception_keeps_its_type(api, scoped, depth):
    def level(left):
        def in_replica():
            if left == 1:
                _fail()
            api.get_replica_context().merge_call(in_merge)

        def in_merge(strategy):
            if left == 2:
                _fail()
            strategy.run(level(left - 2))

        return in_replica

    with pytest.raises(KeyError, match="from a replica"):
        scoped.run(level(depth))
    assert not api.has_strategy()
    assert numbers(scoped.run(lambda: tensor(1.0))) == (
        [1.0] * scoped.num_replicas_in_sync
    )


@contract(35, native=False)
def test_an_exception_in_one_replica_only(api, mirrored):
    """While the others wait for it. It names its replica and its line."""
    last = mirrored.num_replicas_in_sync - 1

    def fn():
        if replica_id(api) == last:
            _fail()
        return api.get_replica_context().all_reduce("SUM", tensor(1.0))

    with pytest.raises(KeyError, match="from a replica") as raised:
        mirrored.run(fn)
    assert not api.has_strategy()
    printed = "".join(traceback.format_exception(raised.value))
    assert f"replica {last}" in printed.lower()
    assert 'raise KeyError("from a replica")' in printed


@contract(36)
def test_what_is_compiled_is_traced_once(api, mirrored):
    traced = []

    @compiled
    def double(x):
        traced.append(x)
        return 2 * x

    def fn(x):
        return double(x)

    value = per_replica(mirrored, lambda i: tensor([1.0 * i]))
    mirrored.run(fn, args=(value,))
    first = len(traced)
    for _ in range(3):
        result = mirrored.run(fn, args=(value,))
    count = mirrored.num_replicas_in_sync
    assert numbers(result) == [[2.0 * i] for i in range(count)]
    if keras.backend.backend() == "torch":
        # Nothing is compiled: the function runs each time.
        assert len(traced) == 4 * count
    else:
        assert len(traced) == first <= count


@contract(37)
def test_a_compiled_function_inside_of_run(api, mirrored):
    add = compiled(lambda x, y: x + y)
    result = mirrored.run(lambda: add(tensor(replica_id(api), "int32"), 10))
    count = mirrored.num_replicas_in_sync
    assert numbers(result) == [10 + i for i in range(count)]


@contract(37)
@runs_compiled
def test_run_inside_of_a_compiled_function(api, mirrored):
    def fn():
        context = api.get_replica_context()
        return tensor(context.replica_id_in_sync_group, "int32") + 10

    result = compiled(lambda: mirrored.run(fn))()
    count = mirrored.num_replicas_in_sync
    assert numbers(result) == [10 + i for i in range(count)]


@contract(38)
@pytest.mark.parametrize("rows", [(9, 4), (4, 9)])
def test_results_may_differ_in_shape(api, two, rows):
    value = per_replica(two, lambda i: tensor(np.arange(2.0 * rows[i])))

    def fn(x):
        pairs = keras.ops.reshape(x, (-1, 2))
        segments = keras.ops.cast(
            keras.ops.arange(pairs.shape[0]) // 2, "int32"
        )
        sums = keras.ops.segment_sum(
            pairs, segments, num_segments=(pairs.shape[0] + 1) // 2
        )
        return pairs, sums, keras.ops.vectorized_map(lambda p: p[0], pairs)

    pairs, sums, firsts = two.run(fn, args=(value,))
    assert [x.shape for x in local(pairs)] == [(n, 2) for n in rows]
    for n, summed in zip(rows, local(sums), strict=True):
        expected = np.arange(2.0 * n).reshape(-1, 2)
        expected = np.add.reduceat(expected, np.arange(0, n, 2))
        np.testing.assert_allclose(summed, expected)
    assert numbers(firsts) == [[2.0 * i for i in range(n)] for n in rows]


@contract(39)
def test_a_replica_without_rows_still_runs(api, mirrored):
    """Of a batch of one row, all but one replica have none."""
    (batch,) = distribute(api, mirrored, [[5.0, 6.0]])
    fixed, dynamic = mirrored.run(
        lambda x: (keras.ops.sum(x), x + 1), args=(batch,)
    )
    empty = mirrored.num_replicas_in_sync - 1
    assert sorted(numbers(fixed)) == [*[0.0] * empty, 11.0]
    shapes = sorted(part.shape for part in local(dynamic))
    assert shapes == [*[(0, 2)] * empty, (1, 2)]


@contract(40)
def test_nested_results_of_distributed_input(api, two):
    seen = []
    for batch in distribute(api, two, [5.0, 6.0], [7.0, 8.0]):
        (result,) = two.run(lambda x: [{"a": x - 1, "b": x + 1}], args=(batch,))
        seen.append((numbers(result["a"]), numbers(result["b"])))
    assert seen == [
        ([[4.0], [5.0]], [[6.0], [7.0]]),
        ([[6.0], [7.0]], [[8.0], [9.0]]),
    ]


@contract(41)
def test_run_options_change_nothing(api, strategy):
    for options in (
        None,
        api.RunOptions(),
        api.RunOptions(
            experimental_enable_dynamic_batch_size=False,
            experimental_bucketizing_dynamic_shape=True,
        ),
    ):
        result = strategy.run(
            lambda x: x + 1, args=(tensor(1.0),), options=options
        )
        assert numbers(result) == [2.0] * strategy.num_replicas_in_sync
