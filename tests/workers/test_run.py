"""`run` and its relatives reach the replicas of all workers."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from conformance.contract import contract
from workers import jobs
from workers.clusters import on_workers
from workers.jobs import shown

EVERYWHERE = pytest.mark.runs_on("jax", "tensorflow", "torch")
each_shape = pytest.mark.parametrize(
    "shape",
    [
        pytest.param((2, 1), marks=pytest.mark.runs_on("torch"), id="2x1"),
        pytest.param((2, 2), marks=EVERYWHERE, id="2x2"),
    ],
)


def made(shape):
    """A strategy, this worker's index, and all and its own replicas' ids."""
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    index = strategy.plan.cluster.index
    every = list(range(shape[0] * shape[1]))
    own = every[index * shape[1] : (index + 1) * shape[1]]
    return strategy, index, every, own


def replica_id():
    context = keras_dist.get_replica_context()
    return ops.cast(context.replica_id_in_sync_group, "float32")


def local(strategy, value):
    return [shown(v) for v in strategy.experimental_local_results(value)]


@contract(218, 219, 225, native=False)
@each_shape
@on_workers()
def test_ids_are_global_and_consecutive(shape):
    strategy, index, every, own = made(shape)

    def ids():
        context = keras_dist.get_replica_context()
        return context.replica_id_in_sync_group, context.num_replicas_in_sync

    extended = strategy.extended
    found = local(strategy, strategy.run(ids))
    assert found == [(each, len(every)) for each in own]
    assert extended.should_checkpoint == (index == 0)
    assert extended.should_save_summary == (index == 0)
    assert strategy.cluster_resolver.task_id == index
    assert len(extended.worker_devices) == shape[1]
    # A worker's only replica gives plain values.
    value = strategy.run(replica_id)
    assert isinstance(value, keras_dist.PerReplica) == (shape[1] > 1)


@contract(218, native=False)
@each_shape
@on_workers()
def test_values_from_a_function(shape):
    strategy, _, _, own = made(shape)
    values = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    doubled = strategy.run(
        lambda x: ops.convert_to_tensor(x) * 2, args=(values,)
    )
    assert local(strategy, doubled) == [2.0 * each for each in own]


@contract(220, native=False)
@each_shape
@on_workers()
def test_reductions(shape):
    strategy, _, every, _ = made(shape)
    own = strategy.run(replica_id)
    found = {
        op: shown(strategy.reduce(op, own, axis=None))
        for op in ("SUM", "MEAN", "MAX", "MIN")
    }
    assert found == {
        "SUM": sum(every),
        "MEAN": np.mean(every),
        "MAX": max(every),
        "MIN": 0,
    }
    # As many rows as the replica's index, of its index.
    rows = strategy.run(lambda: ops.ones((int(replica_id()), 2)) * replica_id())
    all_rows = [[float(each)] * 2 for each in every for _ in range(each)]
    for op, of in (("SUM", np.sum), ("MEAN", np.mean), ("MAX", np.max)):
        np.testing.assert_allclose(
            shown(strategy.reduce(op, rows, axis=0)), of(all_rows, 0), rtol=1e-6
        )
    assert shown(strategy.gather(rows, axis=0)) == all_rows
    column = strategy.run(lambda: ops.ones((2, 1)) * replica_id())
    last = shown(strategy.gather(column, axis=-1))
    assert last == [[float(each) for each in every]] * 2


@contract(67, native=False)
@each_shape
@on_workers()
def test_each_worker_gives_its_part(shape):
    strategy, _, every, _ = made(shape)
    count = float(len(every))
    one = ops.convert_to_tensor(1.0)
    each = strategy.run(lambda: ops.convert_to_tensor(1.0))
    assert shown(strategy.reduce("SUM", each, axis=None)) == count
    assert shown(strategy.extended.reduce_to("SUM", each, "cpu:0")) == count
    pairs = [(each, "cpu:0"), (each, "cpu:0")]
    batch = strategy.extended.batch_reduce_to("SUM", pairs)
    assert shown(batch) == [count, count]
    if shape[1] == 1:
        assert shown(strategy.reduce("SUM", one, axis=None)) == count


@each_shape
@on_workers()
def test_collectives_in_replicas(shape):
    strategy, _, every, _ = made(shape)

    def replica_fn():
        context = keras_dist.get_replica_context()
        own = replica_id()
        rows = ops.ones((int(own) + 1,)) * own
        numbers = ops.cast(rows, "int32")
        merged = context.merge_call(
            lambda strategy, x: strategy.reduce("SUM", x, axis=None), (own,)
        )
        return {
            "sum": context.all_reduce("SUM", own),
            "mean": context.all_reduce("MEAN", own),
            "max": context.all_reduce("MAX", own),
            "count": context.all_reduce("SUM", ops.ones((), "int32")),
            "gather": context.all_gather(rows, axis=0),
            "numbers": context.all_gather(numbers, axis=0),
            "merged": merged,
        }

    rows = [index for index in every for _ in range(index + 1)]
    expected = {
        "sum": sum(every),
        "mean": np.mean(every),
        "max": max(every),
        "count": len(every),
        "gather": rows,
        "numbers": rows,
        "merged": sum(every),
    }
    found = local(strategy, strategy.run(replica_fn))
    assert found == [expected] * shape[1]


@each_shape
@on_workers()
def test_gradients_flow_between_workers(shape):
    strategy, _, every, own = made(shape)

    def replica_fn():
        context = keras_dist.get_replica_context()
        own = replica_id() + 1.0

        def loss(x):
            total = context.all_reduce("SUM", x * x)
            everyone = context.all_gather(ops.reshape(x, (1,)), axis=0)
            return own * total + ops.sum(everyone * everyone)

        return keras_dist.gradient(loss, own)

    found = local(strategy, strategy.run(replica_fn))
    # d/dx of `own * sum(x * x)` on all replicas, and of as many sums of
    # squares as there are replicas.
    factor = sum(each + 1.0 for each in every) + len(every)
    expected = [2 * (each + 1.0) * factor for each in own]
    np.testing.assert_allclose(np.ravel(found), expected, rtol=1e-6)


@contract(117, 219, 220, native=False)
@each_shape
@on_workers()
def test_variables(shape):
    strategy, index, every, own = made(shape)
    with strategy.scope():
        first = keras.Variable(10.0 + index)
        mean = keras.Variable(0.0, aggregation="mean")
        chiefs = keras.Variable(0.0, aggregation="only_first_replica")
        on_read = keras.Variable(
            0.0, aggregation="sum", synchronization="on_read"
        )

    def replica_fn():
        mean.assign(replica_id())
        chiefs.assign(replica_id() + 5.0)
        on_read.assign_add(replica_id() + 1.0)

    assert shown(first.value) == 10.0
    strategy.run(replica_fn)
    strategy.run(replica_fn)
    assert shown(mean.value) == np.mean(every)
    assert shown(chiefs.value) == 5.0
    assert shown(on_read.value) == 2.0 * sum(each + 1 for each in every)
    assert local(strategy, on_read) == [2.0 * (each + 1) for each in own]
    assert repr(first).count("Variable path") == shape[1]


@each_shape
@on_workers()
def test_metrics(shape):
    strategy, _, every, _ = made(shape)
    with strategy.scope():
        mean = keras.metrics.Mean()
    strategy.run(lambda: mean.update_state(replica_id()))
    assert shown(mean.result()) == pytest.approx(np.mean(every))
    mean.update_state(7.0)
    both = (sum(every) + 7.0) / (len(every) + 1)
    assert shown(mean.result()) == pytest.approx(both)
    mean.reset_state()
    assert shown(mean.result()) == 0.0


@each_shape
@on_workers()
def test_an_update_sums_all_gradients(shape):
    strategy, _, every, _ = made(shape)
    with strategy.scope():
        weights = keras.Variable([0.0, 0.0])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weights])

    def replica_fn():
        own = replica_id() + 1.0
        optimizer.apply([ops.stack([own, own])], [weights])

    strategy.run(replica_fn)
    total = sum(each + 1 for each in every)
    found = shown(weights.value)
    np.testing.assert_allclose(found, [-0.1 * total] * 2, rtol=1e-6)


@each_shape
@on_workers()
def test_a_custom_loop(shape):
    found = loop(keras_dist.MultiWorkerMirroredStrategy())
    expected = loop(keras_dist.OneDeviceStrategy("cpu:0"))
    for own, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, want, rtol=1e-4, atol=1e-5)


def loop(strategy):
    """A model, its loss, an optimizer and a metric; all that they leave."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(23, 4)).astype("float32")
    y = rng.normal(size=(23, 1)).astype("float32")
    keras.utils.set_random_seed(5)
    with strategy.scope():
        hidden = keras.layers.Dense(8, activation="tanh")
        model = keras.Sequential(
            [keras.Input((4,)), hidden, keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.Adam(0.05, global_clipnorm=0.5)
        optimizer.build(model.trainable_variables)
        metric = keras.metrics.MeanSquaredError()
    batches = [(x[i : i + 6], y[i : i + 6]) for i in range(0, 23, 6)]
    data = strategy.experimental_distribute_dataset(batches)

    def step(x, y):
        def loss():
            prediction = model(x, training=True)
            metric.update_state(y, prediction)
            return keras_dist.compute_average_loss(
                ops.sum(ops.square(prediction - y), axis=-1)
            )

        variables = model.trainable_variables
        value, gradients = keras_dist.value_and_grad(loss, variables)
        optimizer.apply(gradients, variables)
        return value

    @keras_dist.function
    def train(x, y):
        return strategy.reduce("SUM", strategy.run(step, (x, y)), axis=None)

    losses = [shown(train(*batch)) for _ in range(2) for batch in data]
    return [losses, shown(metric.result()), *model.get_weights()]


@pytest.mark.parametrize("shape", [(2, 1), (2, 2)])
@on_workers()
def test_methods_reach_all_workers_with_central_storage(shape):
    strategy = jobs.central()
    count = strategy.num_replicas_in_sync
    total = 1.0 + sum(range(1, count + 1))
    with strategy.scope():
        v = keras.Variable(1.0, aggregation="sum")
        own = keras.Variable(0.0, aggregation="sum", synchronization="on_read")

    def step():
        own.assign_add(1.0)
        v.assign_add(replica_id() + 1)
        return v + 0.0

    results = strategy.run(step)
    assert shown(v.value) == total
    summed = strategy.reduce("SUM", results, axis=None)
    assert shown(summed) == total * count
    strategy.extended.update(v, lambda copy: copy.assign_add(1.0))
    assert shown(v.value) == total + 1.0
    assert shown(own.value) == float(count)
    assert len(v.values) == 1
    assert strategy.devices_of(v) == (f"cpu:{shape[1] - 1}",)
    assert len(strategy.experimental_local_results(results)) == shape[1]
