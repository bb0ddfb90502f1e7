"""Cross-device operations combine values in packs, wherever they are used."""

import keras
import numpy as np
import pytest

import keras_dist
from conformance.helpers import gradients
from keras_dist.plugin.backend import override_backend
from keras_dist.testing import MemoryBackend

CPUS = ["cpu:0", "cpu:1"]


class Tenfold(keras_dist.CrossDeviceOps):
    """Multiplies what it combines, so that its use shows in numbers."""

    def __init__(self):
        self.batches = []
        self._inner = keras_dist.ReductionToOneDevice(
            accumulation_fn=lambda values: sum(values) * 10
        )

    def reduce_implementation(self, reduce_op, value, destinations, options):
        return self._inner.reduce(reduce_op, value, destinations, options)

    def batch_reduce_implementation(self, reduce_op, pairs, options):
        self.batches.append(len(pairs))
        return self._inner.batch_reduce(reduce_op, pairs, options)


@pytest.mark.parametrize(
    ("num_packs", "combined"), [(0, 5), (1, 2), (2, 4), (9, 5)]
)
def test_values_of_one_dtype_are_combined_in_packs(
    monkeypatch, num_packs, combined
):
    strategy = keras_dist.MirroredStrategy(CPUS)
    calls = []
    combine = strategy.executor.combine

    def counted(op, values):
        calls.append(op)
        return combine(op, values)

    monkeypatch.setattr(strategy.executor, "combine", counted)
    values = [
        np.arange(6, dtype="float32").reshape(2, 3),
        np.ones((), "float32"),
        np.arange(4, dtype="int32"),
        np.zeros((0, 2), "float32"),
        np.ones((1,), "int32"),
    ]
    pairs = [
        (keras_dist.PerReplica([value, value + 1]), "cpu:0") for value in values
    ]
    ops = keras_dist.HierarchicalCopyAllReduce(num_packs)
    with strategy.scope():
        results = ops.batch_reduce(keras_dist.ReduceOp.SUM, pairs)
    assert len(calls) == combined
    for result, value in zip(results, values, strict=True):
        result = keras.ops.convert_to_numpy(result)
        np.testing.assert_array_equal(result, 2 * value + 1)
        assert (result.shape, result.dtype) == (value.shape, value.dtype)


@pytest.mark.parametrize("wrong", [-1, 1.5, "2"])
def test_a_number_of_packs_is_a_count(wrong):
    with pytest.raises(ValueError, match="num_packs"):
        keras_dist.NcclAllReduce(wrong)


@pytest.mark.parametrize(
    "kind",
    ["NcclAllReduce", "HierarchicalCopyAllReduce", "ReductionToOneDevice"],
)
def test_different_shapes_are_refused(kind):
    ops = getattr(keras_dist, kind)()
    value = keras_dist.PerReplica([np.ones(2), np.ones(3)])
    with pytest.raises(ValueError, match="shapes"):
        ops.reduce(keras_dist.ReduceOp.SUM, value, "cpu:0")
    with pytest.raises(ValueError, match="shapes"):
        ops.batch_reduce(keras_dist.ReduceOp.SUM, [(value, "cpu:0")] * 2)


@pytest.mark.parametrize(
    ("op", "expected"), [("MIN", 2.0), ("MAX", 4.0), ("PROD", 8.0)]
)
def test_other_operations_leave_the_accumulation_alone(op, expected):
    ops = keras_dist.ReductionToOneDevice(accumulation_fn=sum)
    value = keras_dist.PerReplica([2.0, 4.0])
    found = ops.reduce(keras_dist.ReduceOp[op], value, "cpu:0")
    assert float(found) == expected


@pytest.mark.parametrize(("op", "gradient"), [("SUM", 4.0), ("MEAN", 2.0)])
def test_gradients_flow_as_without(op, gradient):
    ops = Tenfold()
    strategy = keras_dist.MirroredStrategy(CPUS, cross_device_ops=ops)

    def step(x, weight):
        def loss(x):
            context = keras_dist.get_replica_context()
            return context.all_reduce(op, {"x": x})["x"] * weight

        value, (dx,) = gradients(loss, [x])
        return value / weight, dx

    two, four = map(keras.ops.convert_to_tensor, (2.0, 4.0))
    x = keras_dist.PerReplica([two, four])
    weight = keras_dist.PerReplica([1.0, 3.0])
    values, grads = strategy.run(step, (x, weight))
    assert [float(g) for g in grads.values] == [gradient, gradient]
    total = 60.0 if op == "SUM" else 30.0
    assert [float(v) for v in values.values] == [total, total]
    assert ops.batches == [1]


def test_sums_of_gradients_in_run():
    ops = Tenfold()
    strategy = keras_dist.MirroredStrategy(CPUS, cross_device_ops=ops)
    with strategy.scope():
        v, w = keras.Variable(0.0), keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([v, w])

    def step(x):
        optimizer.apply([keras.ops.convert_to_tensor(x)] * 2, [v, w])

    strategy.run(step, (keras_dist.PerReplica([1.0, 2.0]),))
    assert [float(v), float(w)] == [-30.0, -30.0]
    assert ops.batches == [2]


def test_reductions_along_an_axis():
    strategy = keras_dist.MirroredStrategy(CPUS, cross_device_ops=Tenfold())
    value = keras_dist.PerReplica([[1.0, 2.0], [3.0]])
    assert float(strategy.reduce("SUM", value, axis=0)) == 60.0
    assert float(strategy.reduce("MEAN", value, axis=0)) == 20.0


def test_fit_keeps_the_backends_way():
    weights = []
    for ops in (None, Tenfold()):
        strategy = keras_dist.MirroredStrategy(CPUS, cross_device_ops=ops)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
        weights.append(model.get_weights()[0])
    np.testing.assert_array_equal(*weights)


def test_without_a_strategy_the_backend_is_asked():
    with override_backend(MemoryBackend()) as backend:
        ops = keras_dist.NcclAllReduce()
        value = keras_dist.PerReplica([np.ones(2), np.ones(2)])
        result = ops.reduce(keras_dist.ReduceOp.SUM, value, "gpu:1")
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(result), [2, 2]
        )
        assert len(backend.executors) == 1
