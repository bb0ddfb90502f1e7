"""`merge_call` lets replicas meet, and gives each its part back."""

import pytest

from conformance.contract import contract
from conformance.helpers import compiled
from conformance.helpers import numbers
from conformance.helpers import replica_id
from conformance.helpers import tensor


@contract(42)
def test_the_default_context_merges_alone(api):
    def merge(strategy, x, offset):
        assert api.in_cross_replica_context()
        assert not api.has_strategy()
        assert api.get_replica_context() is None
        assert strategy is api.get_strategy()
        return x + offset

    context = api.get_replica_context()
    assert context.merge_call(merge, args=(1.0,), kwargs={"offset": 2}) == 3.0
    assert not api.in_cross_replica_context()


@contract(43)
def test_replicas_meet_once_and_get_their_parts_back(api, mirrored):
    merged = []

    def merge(strategy, x, *, y):
        assert strategy is mirrored
        assert api.in_cross_replica_context()
        assert api.get_replica_context() is None
        assert isinstance(x, api.PerReplica)
        merged.append((numbers(x), numbers(y)))
        return {"same": 5.0, "own": x}

    def fn():
        x = tensor(10.0 * replica_id(api))
        context = api.get_replica_context()
        result = context.merge_call(merge, args=(x,), kwargs={"y": x + 1})
        assert not api.in_cross_replica_context()
        return result["own"] + result["same"]

    count = mirrored.num_replicas_in_sync
    ids = range(count)
    assert numbers(mirrored.run(fn)) == [10.0 * i + 5 for i in ids]
    assert merged == [([10.0 * i for i in ids], [10.0 * i + 1 for i in ids])]


@contract(43)
def test_one_replica_merges_plain_values(api, single):
    def fn(x):
        context = api.get_replica_context()
        return context.merge_call(lambda strategy, y: y + 1, args=(x,))

    assert single.run(fn, args=(1.0,)) == 2.0


@contract(44, native=False)
@pytest.mark.parametrize("lazy", [0, 1])
@pytest.mark.parametrize("method", ["merge_call", "all_reduce"])
def test_replicas_that_meet_unequally_often_are_named(api, two, method, lazy):
    def fn():
        context = api.get_replica_context()
        if replica_id(api) == lazy:
            return
        if method == "merge_call":
            context.merge_call(lambda strategy: None)
        else:
            context.all_reduce("SUM", tensor(1.0))

    with pytest.raises(api.ReplicaDivergenceError, match="[Rr]eplica") as e:
        two.run(fn)
    assert isinstance(e.value, RuntimeError)
    assert "different number" in str(e.value)
    assert not api.has_strategy()
    assert numbers(two.run(lambda: tensor(1.0))) == [1.0, 1.0]


@contract(45)
def test_merging_while_compiling_works_or_is_refused(api, two):
    def fn():
        @compiled
        def inner(x):
            context = api.get_replica_context()
            return context.merge_call(lambda strategy, y: y, args=(x,))

        return inner(tensor(1.0))

    try:
        result = two.run(fn)
    except (RuntimeError, ValueError) as error:
        assert "merge_call" in str(error)
    else:
        assert numbers(result) == [1.0, 1.0]
    assert not api.has_strategy()
    assert numbers(two.run(lambda: tensor(1.0))) == [1.0, 1.0]


@contract(47)
def test_a_merge_may_run_again(api, mirrored):
    def inner(x):
        context = api.get_replica_context()
        return context.merge_call(lambda strategy, y: y, args=(x + 1,))

    def merge(strategy, x):
        return strategy.run(inner, args=(x,))

    def fn():
        x = tensor(float(replica_id(api)))
        context = api.get_replica_context()
        return context.merge_call(merge, args=(x,))

    count = mirrored.num_replicas_in_sync
    assert numbers(mirrored.run(fn)) == [i + 1.0 for i in range(count)]
