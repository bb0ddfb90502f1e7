"""The examples of the reference pages, for any backend.

A comment over each test names the page and the member it is shown at.
`pages.NOT_RUN` lists the others.
"""

import keras
import numpy as np
import pytest

import keras_dist
from conformance.helpers import compiled
from conformance.helpers import local
from conformance.helpers import replica_id
from conformance.helpers import tensor
from conformance.helpers import to_numpy
from conformance.pages import DEVICES
from conformance.pages import PLACES
from conformance.pages import Range
from conformance.pages import around_run
from conformance.pages import places
from conformance.pages import shown


@pytest.fixture
def strategy():
    return keras_dist.MirroredStrategy(DEVICES)


@pytest.fixture
def one():
    """What `MirroredStrategy()` is on the pages, whose machine has a GPU."""
    return keras_dist.MirroredStrategy(DEVICES[:1])


# All pages: cluster_resolver of single-worker strategies.
def test_a_single_worker_has_no_cluster_resolver(strategy, one):
    assert strategy.cluster_resolver is None
    assert one.cluster_resolver is None
    assert keras_dist.OneDeviceStrategy("cpu:0").cluster_resolver is None


# Strategy: experimental_assign_to_logical_device, one logical device each.
def test_adding_on_logical_device_0(strategy):
    iterator = iter(strategy.experimental_distribute_dataset(Range(4, 2)))

    def step_fn(inputs):
        output = keras.ops.add(inputs, inputs)
        return strategy.experimental_assign_to_logical_device(output, 0)

    assert shown(strategy.run(step_fn, args=(next(iterator),))) == [[0], [2]]


# Strategy: experimental_split_to_logical_devices and
# experimental_replicate_to_logical_devices, one logical device each.
def test_images_on_logical_devices(strategy):
    images = np.arange(2 * 4 * 4 * 1, dtype="float32").reshape(2, 4, 4, 1)
    labels = np.ones((2, 1), "float32")
    model = keras.Sequential(
        [keras.layers.Flatten(), keras.layers.Dense(1, use_bias=False)]
    )
    with strategy.scope():
        model.build((None, 4, 4, 1))
        model.layers[-1].kernel.assign(np.full((16, 1), 0.5, "float32"))
    dataset = strategy.experimental_distribute_dataset([(images, labels)])

    def step_fn(inputs):
        images, labels = inputs
        images = strategy.experimental_split_to_logical_devices(
            images, [1, 1, 1, 1]
        )
        output = model(images)
        labels = strategy.experimental_replicate_to_logical_devices(labels)
        output = strategy.experimental_replicate_to_logical_devices(output)
        return keras.losses.mean_squared_error(labels, output)

    (batch,) = dataset
    losses = strategy.run(step_fn, args=(batch,))
    expected = np.square(images.reshape(2, 16).sum(axis=1) / 2 - 1)
    np.testing.assert_allclose(np.concatenate(local(losses)), expected)


# Strategy: experimental_split_to_logical_devices, for 8 logical devices.
def test_a_split_needs_its_logical_devices(strategy):
    with pytest.raises(ValueError, match="partition_dimensions"):
        strategy.experimental_split_to_logical_devices(
            tensor(np.zeros((1, 4, 4, 1))), [1, 2, 4, 1]
        )


VALUE_FUNCTIONS = {
    "constant": (lambda context: tensor(1.0), (1.0, 1.0)),
    "by id": (
        lambda context: np.array([3.0, 2.0, 1.0])[
            context.replica_id_in_sync_group
        ],
        (3.0, 2.0),
    ),
    "by number": (lambda context: context.num_replicas_in_sync, (2, 2)),
}


# Strategy and both v2 pages of CentralStorageStrategy:
# experimental_distribute_values_from_function, examples 1 to 3.
@pytest.mark.parametrize("name", VALUE_FUNCTIONS)
def test_values_from_a_function(strategy, one, name):
    value_fn, expected = VALUE_FUNCTIONS[name]
    values = strategy.experimental_distribute_values_from_function(value_fn)
    assert isinstance(values, keras_dist.DistributedValues)
    local_result = strategy.experimental_local_results(values)
    assert isinstance(local_result, tuple)
    assert tuple(to_numpy(x).tolist() for x in local_result) == expected

    values = one.experimental_distribute_values_from_function(value_fn)
    (only,) = one.experimental_local_results(values)
    first = 1 if name == "by number" else expected[0]
    assert to_numpy(only).tolist() == first


# The same, example 4: values placed on the devices.
def test_values_that_are_on_the_devices(strategy):
    worker_devices = strategy.extended.worker_devices
    multiple_values = []
    for i in range(strategy.num_replicas_in_sync):
        with keras.device(worker_devices[i]):
            multiple_values.append(tensor(float(i)))

    def value_fn(context):
        return multiple_values[context.replica_id_in_sync_group]

    values = strategy.experimental_distribute_values_from_function(value_fn)
    assert shown(values) == [0.0, 1.0]
    assert [places(x) for x in values.values] == [[name] for name in PLACES]


# CentralStorageStrategy v2: gather, both examples.
def test_gathering_columns(strategy):
    values = strategy.experimental_distribute_values_from_function(
        lambda _: tensor([[1], [2]], "int32")
    )
    gathered = strategy.gather(values, axis=0)
    assert to_numpy(gathered).tolist() == [[1], [2], [1], [2]]
    assert keras.backend.standardize_dtype(gathered.dtype) == "int32"


@pytest.mark.parametrize(
    ("axis", "shape"), [(0, (4, 2, 3)), (1, (1, 8, 3)), (2, (1, 2, 12))]
)
def test_gathering_along_each_axis(axis, shape):
    strategy = keras_dist.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    single = np.arange(6).reshape(1, 2, 3)
    values = strategy.experimental_distribute_values_from_function(
        lambda _: tensor(single, "int32")
    )
    gathered = to_numpy(strategy.gather(values, axis=axis))
    assert gathered.shape == shape
    np.testing.assert_array_equal(
        gathered, np.concatenate([single] * 4, axis=axis)
    )


# OneDeviceStrategy and CentralStorageStrategy (compat.v1): reduce.
def test_a_sum_of_ids_and_where_it_is(strategy):
    def step_fn():
        context = keras_dist.get_replica_context()
        return tensor(context.replica_id_in_sync_group, "int32")

    per_replica_result = strategy.run(step_fn)
    first, second = strategy.experimental_local_results(per_replica_result)
    assert [places(first), places(second)] == [[name] for name in PLACES]
    total = strategy.reduce("SUM", per_replica_result, axis=None)
    assert to_numpy(total) == 1
    assert "cpu:0" in places(total)


# All pages: reduce, a global batch of 8.
def test_with_and_without_an_axis(strategy):
    rows = np.arange(8.0, dtype="float32")
    shares = np.split(rows, 2)
    per_replica_result = strategy.run(
        lambda: tensor(shares[replica_id(keras_dist)])
    )
    total = strategy.reduce("sum", per_replica_result, axis=None)
    assert to_numpy(total).tolist() == [0 + 4, 1 + 5, 2 + 6, 3 + 7]
    total = strategy.reduce("sum", per_replica_result, axis=0)
    assert to_numpy(total).tolist() == sum(range(8))


# All pages: reduce, a last partial batch of 6.
def test_a_partial_batch_has_its_own_denominator(strategy):
    rows = [tensor([0.0, 1.0, 2.0, 3.0]), tensor([4.0, 5.0])]
    values = strategy.experimental_distribute_values_from_function(
        lambda context: rows[context.replica_id_in_sync_group]
    )
    mean = strategy.reduce(keras_dist.ReduceOp.MEAN, values, axis=0)
    assert to_numpy(mean).tolist() == 15 / 6
    with pytest.raises(ValueError, match="axis=0"):
        strategy.reduce(keras_dist.ReduceOp.MEAN, values, axis=None)
    means = strategy.run(keras.ops.mean, args=(values,))
    mean = strategy.reduce(keras_dist.ReduceOp.MEAN, means, axis=None)
    assert to_numpy(mean).tolist() == (1.5 + 4.5) / 2


# All pages: run, example 1.
def test_running_with_a_constant(strategy, one):
    tensor_input = tensor(3.0)

    @compiled
    def replica_fn(value):
        return value * 2.0

    result = strategy.run(replica_fn, args=(tensor_input,))
    assert isinstance(result, keras_dist.PerReplica)
    assert shown(result) == [6.0, 6.0]
    result = one.run(replica_fn, args=(tensor_input,))
    assert keras.ops.is_tensor(result)
    assert shown(result) == [6.0]


# All pages: run, example 2.
def test_running_with_distributed_values(strategy, one):
    @around_run
    def run(strategy):
        def value_fn(value_context):
            return value_context.num_replicas_in_sync

        distributed_values = (
            strategy.experimental_distribute_values_from_function(value_fn)
        )

        def replica_fn2(value):
            return value * 2

        return strategy.run(replica_fn2, args=(distributed_values,))

    assert set(shown(run(strategy))) == {4}
    assert shown(run(one)) == [2]


# OneDeviceStrategy and CentralStorageStrategy (compat.v1): run, example 3.
def test_running_to_reduce_over_all(strategy):
    @around_run
    def run():
        def value_fn(value_context):
            return tensor(value_context.replica_id_in_sync_group, "int32")

        values = strategy.experimental_distribute_values_from_function(value_fn)

        def replica_fn(value):
            return keras_dist.get_replica_context().all_reduce("sum", value)

        return strategy.run(replica_fn, args=(values,))

    result = run()
    assert isinstance(result, keras_dist.DistributedValues)
    assert repr(result).startswith("PerReplica:{\n  0: ")
    assert shown(result) == [1, 1]


# All pages: scope.
def test_variables_in_and_out_of_scope(strategy):
    with strategy.scope():
        mirrored_variable = keras.Variable(1.0, name="inside")
    assert repr(mirrored_variable) == (
        "MirroredVariable:{\n"
        "  0: <Variable path=inside, shape=(), dtype=float32, value=1.0>,\n"
        "  1: <Variable path=inside/replica_1, shape=(), dtype=float32, "
        "value=1.0>\n"
        "}"
    )
    regular_variable = keras.Variable(1.0, name="outside")
    assert repr(regular_variable) == (
        "<Variable path=outside, shape=(), dtype=float32, value=1.0>"
    )


# All pages: what entering a scope does, and what may be outside of it.
def test_what_may_be_done_out_of_scope(strategy, tmp_path):
    with strategy.scope():
        assert keras_dist.get_strategy() is strategy
        assert keras_dist.in_cross_replica_context()
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        v = keras.Variable(1.0)
    assert keras_dist.get_strategy() is not strategy
    assert not keras_dist.in_cross_replica_context()

    v.assign_add(1.0)
    assert [float(component.numpy()) for component in v.values] == [2.0, 2.0]

    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=4, verbose=0)
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    assert len(model.layers[-1].kernel.values) == 2

    with strategy.scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.fit(x, y, batch_size=4, verbose=0)
    assert len(loaded.layers[-1].kernel.values) == 2


# OneDeviceStrategy: the class.
def test_one_device():
    strategy = keras_dist.OneDeviceStrategy(device="cpu:1")
    with strategy.scope():
        v = keras.Variable(1.0)
    assert strategy.devices_of(v) == ("cpu:1",)
    assert strategy.num_replicas_in_sync == 1

    def step_fn(x):
        return x * 2

    result = 0
    for i in range(10):
        result += strategy.run(step_fn, args=(i,))
    assert result == 90


# OneDeviceStrategy: input is on the device, and so is what `run` computes.
def test_everything_on_one_device():
    strategy = keras_dist.OneDeviceStrategy("cpu:1")
    (batch,) = strategy.experimental_distribute_dataset(Range(2, 2))
    assert places(batch) == PLACES[1:]
    assert places(strategy.run(lambda: keras.ops.ones(()))) == PLACES[1:]
