"""What workers run in the tests of this folder, by `keras_dist.launch`."""

import gc
import os
import re
import time

# Before Keras: most of the time here is XLA compiling small programs.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import keras
import numpy as np

import keras_dist
from backends.classifier import classifier
from backends.classifier import rows
from keras_dist.errors import ReplicaDivergenceError
from workers.count_jobs import listening

X, Y = rows(37)


def ends():
    """Ends a second after the chief; returns the chief's address."""
    cluster = keras_dist.MultiWorkerMirroredStrategy().plan.cluster
    time.sleep(cluster.index)
    return cluster.leader


def everything():
    """One worker's findings."""
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    workers = strategy.executor.workers
    found = {
        "devices": [str(device) for device in strategy.plan.devices],
        "collectives": collectives(workers),
    }
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = classifier(
            keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(0.5)
        )
    model.fit(X[:36], Y[:36], batch_size=12, verbose=0)
    found["all_reduces"] = all_reduces("train_step")
    found["after_fit"] = places(model)
    model.train_on_batch(X[:1], Y[:1])
    found["after_one_row"] = places(model)
    model.predict(X, verbose=0)
    model.run_eagerly = True
    found["eager"] = model.evaluate(X, Y, verbose=0)
    model.run_eagerly = False
    found["compiled"] = model.evaluate(X, Y, verbose=0)
    found["statistics"] = compiled_statistics(strategy)
    found["listening"] = listening()
    return found


def collectives(workers):
    """What the workers' own collectives make of some values."""
    index = workers.cluster.index
    odd = [
        np.array([-0.0, np.nan, np.inf, 1e-45], "float32"),
        np.array([True, False, True]),
        np.array(7 + index, "int32"),
        np.zeros((0, 3), "float32"),
        np.array([1.5, -2.0, 3.0], jax.numpy.bfloat16),
    ]
    if index:  # what must not arrive
        odd = [np.ones_like(value) for value in odd[:2]] + odd[2:]
    gathered = workers.gather([np.arange(3, dtype="int8") + index])
    sums = workers.sum(
        [
            np.full((2, 2), 1.5 + index, "float32"),
            np.array(2**30 + index, "int32"),
            np.array([0.5], "float32"),
        ]
    )
    rows = np.full((index, 2), index, "float32")
    programs = []
    gc.collect()
    gc.disable()  # programs of before stay as long as they are counted
    before = compiled_programs()
    for size in range(1, 60, 7):
        workers.sum([np.ones(size, "float32")])
        programs.append(compiled_programs() - before)
    gc.enable()
    return {
        "broadcast": [np.asarray(v) for v in workers.broadcast(odd)],
        "gather": [[np.asarray(v) for v in own] for own in gathered],
        "sum": [np.asarray(v) for v in sums],
        "rows": np.asarray(workers.concatenate(rows, 0)),
        "columns": np.asarray(workers.concatenate(rows.T, 1)),
        "sizes": workers.sizes([index, 5]),
        "many sizes": workers.sizes([index] * 600),
        "other sizes": other_sizes(workers),
        "programs": programs[-1] - programs[0],
    }


def other_sizes(workers):
    """The error of workers with many numbers, and not as many each."""
    try:
        return workers.sizes([1] * (70 + 500 * workers.cluster.index))
    except ReplicaDivergenceError as error:
        return str(error)


def compiled_programs():
    return len(jax.local_devices()[0].client.live_executables())


def all_reduces(name):
    """How many there are in each step that was compiled."""
    modules = [
        executable.hlo_modules()[0]
        for executable in jax.local_devices()[0].client.live_executables()
    ]
    return [
        len(re.findall(r"\ball-reduce(?:-start)?\(", module.to_string()))
        for module in modules
        if module.name == f"jit_{name}"
    ]


def places(model):
    """How many devices of other workers hold a part of some variable."""
    variables = [*model.variables, *model.optimizer.variables]
    return sum(not v.value.is_fully_addressable for v in variables)


def share_out(strategy, rows):
    """Each replica's rows."""
    count = strategy.num_replicas_in_sync

    def own(context):
        position = context.replica_id_in_sync_group
        begin, end = (
            -(-len(rows) * at // count) for at in (position, position + 1)
        )
        return rows[begin:end]

    return strategy.experimental_distribute_values_from_function(own)


def compiled_statistics(strategy):
    """What is gathered and reduced inside, and what moving means become."""
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 6))

    @keras_dist.function
    def gathered(x):
        y = strategy.run(lambda x: layer(x, training=True) * 0 + x, args=(x,))
        return strategy.gather(y, axis=0), strategy.reduce("SUM", y, axis=0)

    with strategy.scope():
        rows, total = gathered(share_out(strategy, X[:13]))
    return np.asarray(rows), np.asarray(total), layer.get_weights()
