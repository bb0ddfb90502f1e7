"""The replica-level API on workers: each function returns what one saw."""

import keras
import numpy as np
from keras import ops

import keras_dist
from workers.jobs import shown


def strategy_made():
    return keras_dist.MultiWorkerMirroredStrategy()


def everything():
    """What `test_run.py` looks at, from one launch."""
    strategy = strategy_made()
    results = {}
    for fn in (
        identity,
        values,
        reductions,
        host_values,
        collectives,
        gradients,
        variables,
        metrics,
        updates,
        loop,
    ):
        try:
            results[fn.__name__] = fn(strategy)
        except Exception as error:  # it fails that test, not the others
            results[fn.__name__] = f"{type(error).__name__}: {error}"
    return results


def alone():
    """The custom loop on one device."""
    return loop(keras_dist.OneDeviceStrategy("cpu:0"))


def local(strategy, value):
    return [shown(v) for v in strategy.experimental_local_results(value)]


def identity(strategy):
    def replica_fn():
        context = keras_dist.get_replica_context()
        return context.replica_id_in_sync_group, context.num_replicas_in_sync

    extended = strategy.extended
    return {
        "ids": local(strategy, strategy.run(replica_fn)),
        "count": strategy.num_replicas_in_sync,
        "chief": extended.should_checkpoint,
        "summary": extended.should_save_summary,
        "tasks": strategy.cluster_resolver.task_id,
        "devices": len(extended.worker_devices),
        "wrapped": isinstance(strategy.run(replica_id), keras_dist.PerReplica),
    }


def replica_id():
    context = keras_dist.get_replica_context()
    return ops.cast(context.replica_id_in_sync_group, "float32")


def values(strategy):
    made = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    doubled = strategy.run(lambda x: ops.convert_to_tensor(x) * 2, args=(made,))
    return local(strategy, doubled)


def reductions(strategy):
    own = strategy.run(replica_id)
    # As many rows as the replica's index, of its index.
    rows = strategy.run(lambda: ops.ones((int(replica_id()), 2)) * replica_id())
    return shown(
        {
            "sum": strategy.reduce("SUM", own, axis=None),
            "mean": strategy.reduce("MEAN", own, axis=None),
            "max": strategy.reduce("MAX", own, axis=None),
            "min": strategy.reduce("MIN", own, axis=None),
            "rows_sum": strategy.reduce("SUM", rows, axis=0),
            "rows_mean": strategy.reduce("MEAN", rows, axis=0),
            "rows_max": strategy.reduce("MAX", rows, axis=0),
            "gather": strategy.gather(rows, axis=0),
            "gather_last": strategy.gather(
                strategy.run(lambda: ops.ones((2, 1)) * replica_id()), axis=-1
            ),
        }
    )


def host_values(strategy):
    one = ops.convert_to_tensor(1.0)
    extended = strategy.extended
    each = strategy.run(lambda: ops.convert_to_tensor(1.0))
    found = {
        "run": strategy.reduce("SUM", each, axis=None),
        "to": extended.reduce_to("SUM", each, "cpu:0"),
        "batch": extended.batch_reduce_to(
            "SUM", [(each, "cpu:0"), (each, "cpu:0")]
        ),
    }
    if strategy.plan.num_local_replicas == 1:
        found["host"] = strategy.reduce("SUM", one, axis=None)
    return shown(found)


def collectives(strategy):
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

    return local(strategy, strategy.run(replica_fn))


def gradients(strategy):
    def replica_fn():
        context = keras_dist.get_replica_context()
        own = replica_id() + 1.0

        def loss(x):
            total = context.all_reduce("SUM", x * x)
            everyone = context.all_gather(ops.reshape(x, (1,)), axis=0)
            return own * total + ops.sum(everyone * everyone)

        return keras_dist.gradient(loss, own)

    return local(strategy, strategy.run(replica_fn))


def variables(strategy):
    index = strategy.plan.cluster.index
    with strategy.scope():
        first = keras.Variable(10.0 + index)
        mean = keras.Variable(0.0, aggregation="mean")
        chiefs = keras.Variable(0.0, aggregation="only_first_replica")
        on_read = keras.Variable(
            0.0, aggregation="sum", synchronization="on_read"
        )
    initial = shown(first.value)

    def replica_fn():
        mean.assign(replica_id())
        chiefs.assign(replica_id() + 5.0)
        on_read.assign_add(replica_id() + 1.0)

    strategy.run(replica_fn)
    strategy.run(replica_fn)
    return {
        "initial": initial,
        "mean": shown(mean.value),
        "chiefs": shown(chiefs.value),
        "on_read": shown(on_read.value),
        "own": local(strategy, on_read),
        "printed": repr(first).count("Variable path"),
    }


def metrics(strategy):
    with strategy.scope():
        mean = keras.metrics.Mean()
    strategy.run(lambda: mean.update_state(replica_id()))
    before = shown(mean.result())
    mean.update_state(7.0)
    after = shown(mean.result())
    mean.reset_state()
    return [before, after, shown(mean.result())]


def updates(strategy):
    with strategy.scope():
        weights = keras.Variable([0.0, 0.0])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weights])

    def replica_fn():
        own = replica_id() + 1.0
        optimizer.apply([ops.stack([own, own])], [weights])

    strategy.run(replica_fn)
    return shown(weights.value)


def loop(strategy):
    """The custom loop: a model, its loss, an optimizer, a metric."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(23, 4)).astype("float32")
    y = rng.normal(size=(23, 1)).astype("float32")
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.Dense(1),
            ]
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

        value, grads = keras_dist.value_and_grad(
            loss, model.trainable_variables
        )
        optimizer.apply(grads, model.trainable_variables)
        return value

    @keras_dist.function
    def train(x, y):
        return strategy.reduce("SUM", strategy.run(step, (x, y)), axis=None)

    losses = [shown(train(*batch)) for _ in range(2) for batch in data]
    return {
        "losses": losses,
        "metric": shown(metric.result()),
        "weights": [w.tolist() for w in model.get_weights()],
    }
