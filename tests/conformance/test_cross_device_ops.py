"""Cross-device operations, also the user's own, give the same numbers."""

import pytest

import keras_dist
from conformance.contract import contract
from conformance.helpers import numbers
from conformance.helpers import tensor
from conformance.variables import copies
from conformance.variables import parts
from conformance.variables import variable

DEVICES = ["cpu:0", "cpu:1"]
KINDS = {
    "to_one": lambda api: api.ReductionToOneDevice(),
    "to_the_second": lambda api: api.ReductionToOneDevice("cpu:1"),
    "hierarchical": lambda api: api.HierarchicalCopyAllReduce(),
    "hierarchical_unpacked": lambda api: api.HierarchicalCopyAllReduce(0),
}


@pytest.fixture(params=KINDS)
def ops(request, api):
    return KINDS[request.param](api)


@contract(158)
@pytest.mark.parametrize(("op", "expected"), [("SUM", 6.0), ("MEAN", 3.0)])
def test_all_reduce_alike(api, ops, op, expected):
    two = api.MirroredStrategy(DEVICES, cross_device_ops=ops)
    value = parts(two, [2.0, 4.0])
    v = variable(api, two, 0.0)
    assert numbers(two.reduce(op, value, axis=None)) == [expected]
    assert numbers(two.extended.reduce_to(op, value, v)) == [expected] * 2
    pairs = [(value, v), (parts(two, [[1.0], [3.0]]), "cpu:0"), (value, v)]
    one, other, last = two.extended.batch_reduce_to(op, pairs)
    assert numbers(one) == numbers(last) == [expected] * 2
    assert numbers(other) == [[4.0 if op == "SUM" else 2.0]]
    reduced = two.run(
        lambda x: api.get_replica_context().all_reduce(op, [x, x * 2]),
        args=(value,),
    )
    assert [numbers(x) for x in reduced] == [
        [expected] * 2,
        [2 * expected] * 2,
    ]


@contract(158)
def test_all_gather_and_broadcast_alike(api, ops):
    two = api.MirroredStrategy(DEVICES, cross_device_ops=ops)
    rows = parts(two, [[[1.0]], [[2.0]]])
    assert numbers(two.gather(rows, axis=0)) == [[[1.0], [2.0]]]
    assert numbers(two.gather(rows, axis=1)) == [[[1.0, 2.0]]]
    v = variable(api, two, 0.0)
    sent = two.extended.broadcast_to(tensor(3.0), v)
    assert numbers(sent) == [3.0, 3.0]


@contract(158, native=False)
@pytest.mark.parametrize(("op", "expected"), [("SUM", 6.0), ("MEAN", 3.0)])
def test_all_can_be_called_directly(api, ops, op, expected):
    two = api.MirroredStrategy(DEVICES)
    value = parts(two, [2.0, 4.0])
    with pytest.raises(ValueError, match="reduce_op"):
        ops.reduce(op, value, value)  # by no name
    op = api.ReduceOp[op]
    assert numbers(ops.reduce(op, value, "cpu:1")) == [expected]
    assert numbers(ops.reduce(op, value, value)) == [expected] * 2
    pairs = [(value, value), (value, value), (value, "cpu:0")]
    first, second, to_one = ops.batch_reduce(op, pairs)
    assert numbers(first) == numbers(second) == [expected] * 2
    assert numbers(to_one) == [expected]
    assert numbers(ops.broadcast(tensor(3.0), value)) == [3.0, 3.0]


@contract(158)
@pytest.mark.parametrize("kind", ["NcclAllReduce", "HierarchicalCopyAllReduce"])
def test_a_negative_number_of_packs_is_refused(api, kind):
    with pytest.raises(ValueError, match="num_packs"):
        getattr(api, kind)(num_packs=-1)


@contract(158, native=False)
@pytest.mark.filterwarnings("ignore:NCCL")
def test_nccl_gives_the_same_numbers_without_an_accelerator(api):
    two = api.MirroredStrategy(
        DEVICES, cross_device_ops=api.NcclAllReduce(num_packs=2)
    )
    value = parts(two, [2.0, 4.0])
    assert numbers(two.reduce("SUM", value, axis=None)) == [6.0]
    reduced = two.run(
        lambda x: api.get_replica_context().all_reduce("MEAN", x), (value,)
    )
    assert numbers(reduced) == [3.0, 3.0]


@contract(158)
def test_the_accumulation_may_be_the_users(api):
    two = api.MirroredStrategy(DEVICES)
    ops = api.ReductionToOneDevice(
        accumulation_fn=lambda values: sum(values) * 10
    )
    value = parts(two, [2.0, 4.0])
    assert numbers(ops.reduce(api.ReduceOp.SUM, value, "cpu:0")) == [60.0]


def _recording(api):
    """Operations of the user's own, which multiply sums by 10."""

    class Recording(api.CrossDeviceOps):
        def __init__(self):
            super().__init__()
            self.calls = []
            self._inner = api.ReductionToOneDevice(
                accumulation_fn=lambda values: sum(values) * 10
            )

        def reduce_implementation(
            self, reduce_op, per_replica_value, destinations, options
        ):
            self.calls.append("reduce")
            return self._inner.reduce(
                reduce_op, per_replica_value, destinations
            )

        def batch_reduce_implementation(
            self, reduce_op, value_destination_pairs, options
        ):
            self.calls.append(f"batch of {len(value_destination_pairs)}")
            return self._inner.batch_reduce(reduce_op, value_destination_pairs)

        def broadcast_implementation(self, tensor, destinations):
            self.calls.append("broadcast")
            return self._inner.broadcast(tensor * 10, destinations)

    return Recording()


@contract(158, native=False)
def test_operations_of_the_users_own_are_used(api):
    """By methods of the strategy, in replicas, and for writes."""
    ops = _recording(api)
    two = api.MirroredStrategy(DEVICES, cross_device_ops=ops)
    value = parts(two, [2.0, 4.0])
    v = variable(api, two, 0.0, aggregation="sum")
    extended = two.extended

    assert numbers(two.reduce("SUM", value, axis=None)) == [60.0]
    assert numbers(extended.reduce_to("SUM", value, v)) == [60.0, 60.0]
    pairs = [(value, v), (value, v)]
    results = extended.batch_reduce_to("SUM", pairs)
    results += two.run(
        lambda x: api.get_replica_context().all_reduce("SUM", [x, x]), (value,)
    )
    assert [numbers(result) for result in results] == [[60.0, 60.0]] * 4
    assert numbers(extended.broadcast_to(tensor(1.0), v)) == [10.0, 10.0]
    batches = ["batch of 2"] * 2
    assert ops.calls == ["reduce", "reduce", *batches, "broadcast"]
    two.run(v.assign, (value,))
    assert copies(v) == [60.0, 60.0]
    assert len(ops.calls) > 5


@contract(158, native=False)
def test_the_base_class_asks_for_what_is_missing(api):
    class Lazy(api.CrossDeviceOps):
        pass

    two = api.MirroredStrategy(DEVICES)
    value = parts(two, [2.0, 4.0])
    with pytest.raises(NotImplementedError, match="reduce_implementation"):
        Lazy().reduce(api.ReduceOp.SUM, value, value)


@contract(158, native=False)
def test_only_operations_are_taken_as_such(api):
    with pytest.raises((TypeError, ValueError), match="cross_device_ops"):
        keras_dist.MirroredStrategy(DEVICES, cross_device_ops="sum")
