"""A variable reads as one value outside, and is saved as one value."""

import contextlib

import keras
import numpy as np
import pytest

import keras_dist
from conformance.contract import contract
from conformance.helpers import local
from conformance.helpers import replica_id
from conformance.helpers import to_numpy
from conformance.variables import AGGREGATIONS
from conformance.variables import SYNCHRONIZATIONS
from conformance.variables import copies
from conformance.variables import current
from conformance.variables import in_replicas
from conformance.variables import parts
from conformance.variables import read
from conformance.variables import variable


@contract(136, 137)
@pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_replica_reads_its_own(api, mirrored, synchronization, aggregation):
    n = mirrored.num_replicas_in_sync
    v = variable(
        api,
        mirrored,
        3.0,
        synchronization=synchronization,
        aggregation=aggregation,
    )

    def seen():
        values = mirrored.run(lambda: current(v))
        return [part.tolist() for part in local(values)]

    assert seen() == copies(v) == [3.0] * n
    if synchronization == "on_read":
        in_replicas(api, mirrored, v.assign)
        assert seen() == [float(r) for r in range(n)]
    else:
        with mirrored.scope():
            assert read(v) == 3.0
        assert read(v) == 3.0


@contract(136, native=False)
@pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
def test_every_way_of_reading_is_the_replicas_own(api, two, synchronization):
    v = variable(
        api, two, 3.0, synchronization=synchronization, aggregation="sum"
    )
    expected = (3.0, 3.0)
    if synchronization == "on_read":
        in_replicas(api, two, v.assign)
        expected = (0.0, 1.0)

    def step():
        return [
            float(v.numpy()),
            to_numpy(v.value).tolist(),
            to_numpy(keras.ops.convert_to_tensor(v)).tolist(),
            to_numpy(v + 0.0).tolist(),
        ]

    assert [value.values for value in two.run(step)] == [expected] * 4


@contract(138)
@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
@pytest.mark.parametrize("in_scope", [True, False])
def test_parts_are_combined_when_read(api, mirrored, aggregation, in_scope):
    v = variable(
        api, mirrored, synchronization="on_read", aggregation=aggregation
    )
    in_replicas(api, mirrored, lambda r: v.assign(r))
    n = mirrored.num_replicas_in_sync
    total = n * (n - 1) / 2
    expected = {"sum": total, "mean": total / n, "only_first_replica": 0.0}
    with mirrored.scope() if in_scope else contextlib.nullcontext():
        values = _every_reading(api, v)
    assert values == [expected[aggregation]] * len(values)


def _every_reading(api, v):
    readings = [read(v), float(np.asarray(v.numpy()))]
    if api is keras_dist:
        readings += [
            to_numpy(v.value).tolist(),
            to_numpy(keras.ops.convert_to_tensor(v)).tolist(),
            float(np.asarray(v)),
        ]
    return readings


@contract(139)
def test_parts_that_nothing_combines_are_not_read(api, two):
    v = variable(api, two, synchronization="on_read", aggregation="none")
    with two.scope(), pytest.raises(ValueError, match=r"(?i)none"):
        current(v)
    with pytest.raises(ValueError, match=r"(?i)none"):
        v.numpy()


@contract(140)
def test_arithmetic_uses_the_value_here(api, two):
    parts = variable(api, two, synchronization="on_read", aggregation="mean")
    in_replicas(api, two, lambda r: parts.assign(r))
    with two.scope():
        assert to_numpy(parts + 1).tolist() == 1.5
    values = two.run(lambda: parts + 1)
    assert [part.tolist() for part in local(values)] == [1.0, 2.0]

    whole = variable(api, two, 1, dtype="int32", trainable=False)
    with two.scope():
        assert to_numpy(whole + 1).tolist() == 2
    values = two.run(lambda: whole + 1)
    assert [part.tolist() for part in local(values)] == [2, 2]


@contract(140, native=False)
def test_what_is_outside_of_replicas_can_be_combined(api, two):
    rows = parts(two, [[1.0, 2.0], [3.0, 4.0]])
    whole = variable(api, two, [1.0, 1.0])
    total = variable(api, two, synchronization="on_read", aggregation="sum")
    in_replicas(api, two, total.assign)
    values = {
        "reduced": (two.reduce("SUM", rows, axis=None), [4.0, 6.0]),
        "reduced along rows": (two.reduce("SUM", rows, axis=0), 10.0),
        "gathered": (two.gather(rows, axis=0)[:2], [1.0, 2.0]),
        "variable": (whole.value, [1.0, 1.0]),
        "total": (total.value, 1.0),
        "tensor": (keras.ops.convert_to_tensor([5.0, 5.0]), [5.0, 5.0]),
    }
    for left, of_left in values.values():
        for right, of_right in values.values():
            np.testing.assert_array_equal(
                to_numpy(left + right), np.add(of_left, of_right)
            )
    for value in ("reduced", "gathered", "variable", "tensor"):
        target = variable(api, two, [0.0, 0.0])
        target.assign(values[value][0])
        assert copies(target) == [values[value][1]] * 2


@contract(142)
@pytest.mark.parametrize(
    ("method", "aggregation", "expected"),
    [
        ("assign_add", "sum", [0.0, 2.0, 2.0]),
        ("assign_sub", "mean", [0.0, -1.0, -1.0]),
        ("assign_add", "only_first_replica", [0.0, 1.0, 0.0]),
    ],
)
def test_scattered_rows_are_combined(api, two, method, aggregation, expected):
    v = variable(api, two, [0.0, 0.0, 0.0], aggregation=aggregation)

    def step():
        r = replica_id(api)
        rows = keras.ops.scatter(
            keras.ops.convert_to_tensor([[r], [r + 1]], dtype="int32"),
            keras.ops.convert_to_tensor([float(r), float(r + 1)]),
            (3,),
        )
        getattr(v, method)(rows)

    two.run(step)
    assert copies(v) == [expected, expected]


@contract(142)
def test_a_scatter_update_is_an_assignment(api, two):
    v = variable(api, two, [1.0, 2.0, 3.0], aggregation="mean")

    def step():
        r = replica_id(api)
        indices = keras.ops.convert_to_tensor([[r]], dtype="int32")
        updates = keras.ops.convert_to_tensor([9.0])
        v.assign(keras.ops.scatter_update(current(v), indices, updates))

    two.run(step)
    assert copies(v) == [[5.0, 5.5, 3.0]] * 2


class Holder(keras.layers.Layer):
    """A layer with one variable."""

    def __init__(self, initial, **kwargs):
        super().__init__(name="holder")
        self.held = keras.Variable(initial, name="held", **kwargs)

    def call(self, x):
        return x


def _holder(strategy, initial, **kwargs):
    if strategy is None:
        return keras.Sequential([keras.Input((1,)), Holder(initial)])
    with strategy.scope():
        return keras.Sequential([keras.Input((1,)), Holder(initial, **kwargs)])


def _held(model):
    return copies(model.layers[0].held)


@contract(144)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    ("saved_by", "read_by"),
    [("two", "two"), ("two", "plain"), ("plain", "two")],
)
def test_equal_copies_are_saved_as_one_value(
    api, two, aggregation, saved_by, read_by, tmp_path
):
    path = tmp_path / "weights.weights.h5"
    strategies = {"two": two, "plain": None}
    _holder(strategies[saved_by], 2.0, aggregation=aggregation).save_weights(
        path
    )
    model = _holder(strategies[read_by], 0.0, aggregation=aggregation)
    model.load_weights(path)
    assert _held(model) == [2.0] * (2 if read_by == "two" else 1)


@contract(145)
@pytest.mark.parametrize("aggregation", ["sum", "mean"])
def test_parts_are_saved_as_what_is_read(api, two, aggregation, tmp_path):
    path = tmp_path / "weights.weights.h5"
    kwargs = {"synchronization": "on_read", "aggregation": aggregation}
    model, again, alone = (
        _holder(strategy, 0.0, **kwargs) for strategy in (two, two, None)
    )
    given = parts(two, [4.0, 3.0])
    two.run(model.layers[0].held.assign, args=(given,))
    model.save_weights(path)
    for each in (again, alone):
        each.load_weights(path)
    assert _held(again) == [3.5, 3.5]
    assert _held(alone) == [7.0 if aggregation == "sum" else 3.5]
    # A plain value is restored into parts.
    alone.layers[0].held.assign(2.0)
    alone.save_weights(path)
    model.load_weights(path)
    assert _held(model) == [1.0 if aggregation == "sum" else 2.0] * 2


@contract(146)
@pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
def test_a_variable_is_one_entry_of_what_is_saved(api, two, synchronization):
    model = _holder(
        two, 2.0, synchronization=synchronization, aggregation="mean"
    )
    store = {}
    model.layers[0].save_own_variables(store)
    assert {key: np.shape(value) for key, value in store.items()} == {"0": ()}


@contract(147, native=False)
def test_slots_of_an_optimizer_are_restored_into_the_strategy(
    api, two, tmp_path
):
    path = tmp_path / "optimizer.keras"
    with two.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(), "mse")
    gradients = [keras.ops.ones(w.shape) for w in model.trainable_weights]
    two.run(lambda: model.optimizer.apply(gradients, model.trainable_weights))
    model.save(path)

    with two.scope():
        restored = keras.saving.load_model(path)
    pairs = zip(
        model.optimizer.variables, restored.optimizer.variables, strict=True
    )
    for before, after in pairs:
        assert after.distribute_strategy is two
        assert copies(after) == copies(before)
    assert copies(restored.optimizer.iterations) == [1, 1]


@contract(148, native=False)
def test_a_saved_model_has_one_value_per_variable(api, two, tmp_path):
    path = tmp_path / "model.keras"
    with two.scope():
        model = keras.Sequential(
            [
                keras.Input((2,)),
                keras.layers.Dense(3),
                keras.layers.BatchNormalization(),
            ]
        )
    model.layers[0].bias.assign([1.0, 2.0, 3.0])
    model.save(path)
    loaded = keras.saving.load_model(path)
    assert not any(
        isinstance(w, keras_dist.DistributedValues) for w in loaded.weights
    )
    for ours, plain in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(plain), np.asarray(ours))
