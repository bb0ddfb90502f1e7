"""What workers run in `test_central.py`."""

import dataclasses

import keras

import keras_dist
from parity import cases
from parity import harness
from workers.jobs import attempted
from workers.jobs import shown


def central_strategy():
    """One copy of each variable a worker, on its last device."""
    plan = keras_dist.MultiWorkerMirroredStrategy().plan
    return keras_dist.Strategy(
        dataclasses.replace(
            plan, variable_devices=plan.devices[-1:], is_central=True
        )
    )


def train_cases(names):
    """Trains cases of the parity table; a dict of outcomes by name."""
    strategy = central_strategy()
    by_name = {case.name: case for case in cases.CASES}

    def trained(name):
        return harness.train(
            by_name[name], strategy.num_replicas_in_sync, lambda _: strategy
        )

    outcomes = {name: attempted(trained, name) for name in names}
    outcomes["api"] = attempted(api, strategy)
    return outcomes


def api(strategy):
    """What the methods of the strategy give."""
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
