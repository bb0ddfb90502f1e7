"""What workers run in `test_central.py`."""

import dataclasses

import keras

import keras_dist
from parity import cases
from parity import harness
from workers.jobs import shown


def central_strategy():
    """One copy of each variable a worker, on its last device."""
    plan = keras_dist.MultiWorkerMirroredStrategy().plan
    return keras_dist.Strategy(
        dataclasses.replace(
            plan, variable_devices=plan.devices[-1:], is_central=True
        )
    )


def train_case(name):
    """The outcome of a case of the parity table."""
    strategy = central_strategy()
    (case,) = (case for case in cases.CASES if case.name == name)
    return harness.train(
        case, strategy.num_replicas_in_sync, lambda _: strategy
    )


def api():
    """What the methods of the strategy give."""
    strategy = central_strategy()
    with strategy.scope():
        v = keras.Variable(1.0, aggregation="sum")
        own = keras.Variable(0.0, aggregation="sum", synchronization="on_read")

    def step():
        context = keras_dist.get_replica_context()
        own.assign_add(1.0)
        replica = context.replica_id_in_sync_group
        v.assign_add(keras.ops.ones(()) * (replica + 1))
        return v + 0.0

    results = strategy.run(step)
    first = shown(v.value)
    total = strategy.reduce("SUM", results, axis=None)
    strategy.extended.update(v, lambda copy: copy.assign_add(1.0))
    return {
        "assigned": first,
        "updated": shown(v.value),
        "own": shown(own.value),
        "reduced": shown(total),
        "copies": len(v.values),
        "devices": strategy.devices_of(v),
        "local": len(strategy.experimental_local_results(results)),
    }
