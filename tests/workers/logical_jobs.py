"""What workers run in `test_logical_devices.py`."""

import pathlib

import keras
import numpy as np

import keras_dist
from backends.jax import test_logical_devices as alone
from keras_dist.core.variable_layouts import VariableLayouts
from keras_dist_jax.placement import arrays
from keras_dist_jax.sharding import shards
from parity import cases
from parity import harness
from parity.harness import state_of
from parity.test_logical_devices import last_even_axis
from workers.jobs import attempted

MODELS = {"mlp": alone.mlp, "transformer": alone.transformer}
COLUMNS = {**alone.LAYOUTS, r".*up/kernel": ("logical", None)}


def in_cluster(logical, what="mirrored", layout_map=None):
    """A strategy whose replicas have that many devices each."""
    sharded = {} if what == "mirrored" else {what: "sharded"}
    return keras_dist.MultiWorkerMirroredStrategy(
        logical_devices=logical,
        layout_map=alone.ATTENTION if layout_map is None else layout_map,
        **sharded,
    )


def of_kind(kind, optimizer="momentum"):
    """A strategy, a compiled model, and its inputs."""
    name, logical, what = kind
    layout_map = alone.LAYOUTS if name == "mlp" else alone.ATTENTION
    strategy = in_cluster(logical, what, layout_map)
    return strategy, *alone.made(
        MODELS[name], optimizer, strategy, metrics=["accuracy"]
    )


def train(kind, optimizer):
    """What a model has at the end, and the parts that a device has."""
    _, model, x = of_kind(kind, optimizer)
    found = alone.outcome(model, x)
    parts = {
        v.path: alone.part_of(v) for v in model.weights if shards.is_sharded(v)
    }
    return found, parts


def train_case(what, name):
    """The outcome of a case of the parity table, all of it in parts."""
    before = VariableLayouts.axes_of, shards.LEAST_ELEMENTS, harness.strategy
    VariableLayouts.axes_of, shards.LEAST_ELEMENTS = last_even_axis, 1
    strategy = in_cluster(2, what, {})
    harness.strategy = lambda num_replicas: strategy
    (case,) = (case for case in cases.CASES if case.name == name)
    try:
        return harness.train(case, 4, harness.strategy)
    finally:
        VariableLayouts.axes_of, shards.LEAST_ELEMENTS, harness.strategy = (
            before
        )


def few_rows(kind, rows):
    """What a model has after batches that replicas can't divide."""
    _, model, x = of_kind(kind)
    model.fit(
        x[:rows], alone.LABELS[:rows], batch_size=rows, epochs=2, verbose=0
    )
    return state_of(model)


def put_back(kind):
    """Each device's parts before and after a way through host memory."""
    _, model, x = of_kind(kind)
    model.fit(x, alone.LABELS, batch_size=20, verbose=0)
    pairs = []
    for variable in [*model.variables, *model.optimizer.variables]:
        if shards.is_sharded(variable):
            array, own = shards.stored(variable), shards.shards_of(variable)
            found = own.put_own(arrays.own_shard(array))
            pairs.append((_parts(found), _parts(array)))
    return pairs


def _parts(array):
    shards = array.addressable_shards
    return {each.device.id: np.asarray(each.data) for each in shards}


def operation_by_operation(kind):
    """What a model has after steps that are not compiled."""
    _, model, x = of_kind(kind)
    model.run_eagerly = True
    model.fit(x[:26], alone.LABELS[:26], batch_size=13, verbose=0)
    return state_of(model)


def loop(logical, is_compiled, rows):
    """The weights after a loop of the user's own."""
    strategy = in_cluster(logical, "mirrored", alone.LAYOUTS)
    return alone.trained_by_a_loop(strategy, is_compiled, rows)[1]


def save(kind, folder):
    """Trains, saves in each way there is, and sets weights; the states."""
    strategy, model, x = of_kind(kind)
    own = pathlib.Path(folder, str(strategy.plan.cluster.index))
    own.mkdir()
    checkpoint = keras.callbacks.ModelCheckpoint(
        str(own / "each" / "{epoch}.keras"), save_best_only=True
    )
    model.fit(
        x,
        alone.LABELS,
        validation_split=0.2,
        batch_size=20,
        verbose=0,
        callbacks=[checkpoint],
    )
    saved = state_of(model)
    model.save(str(own / "model.keras"))
    model.save_weights(str(own / "some.weights.h5"))
    keras_dist.save_sharded(model, pathlib.Path(folder, "parts"))
    # If replicas don't divide it, each worker has all parts of a variable.
    if kind[2] == "mirrored" and strategy.plan.is_chief:
        model.get_layer("up").kernel.numpy()
    weights = model.get_weights()
    model.set_weights([np.zeros_like(each) for each in weights])
    zeros = model.get_weights()
    model.set_weights(weights)
    return {
        "saved": saved,
        "set": state_of(model),
        "zeros": [float(abs(each).max()) for each in zeros],
        "files": sorted(
            str(p.relative_to(own)) for p in own.rglob("*") if p.is_file()
        ),
    }


def load(kind, folder):
    """The states that are loaded from what `save` has written."""
    strategy, model, x = of_kind(kind)
    keras_dist.restore_sharded(model, pathlib.Path(folder, "parts"))
    restored = state_of(model)
    model.fit(x, alone.LABELS, batch_size=20, verbose=0)
    chiefs = pathlib.Path(folder, "0")
    with strategy.scope():
        loaded = keras.models.load_model(str(chiefs / "model.keras"))
    _, weights, _ = of_kind(kind)
    weights.optimizer.build(weights.trainable_variables)
    weights.load_weights(str(chiefs / "some.weights.h5"))
    return {
        "restored": restored,
        "gone_on": state_of(model),
        "loaded": state_of(loaded),
        "weights": state_of(weights),
        "part": alone.part_of(loaded.get_layer("up").kernel),
    }


def cores(shape):
    """What a model has at the end, on the cores of two hosts' TPU."""
    resolver = keras_dist.cluster_resolver.TPUClusterResolver("virtual")
    tpu = keras_dist.tpu.experimental
    topology = tpu.initialize_tpu_system(resolver)
    built = tpu.DeviceAssignment.build(
        topology,
        computation_shape=shape,
        num_replicas=8 // int(np.prod(shape)),
    )
    strategy = keras_dist.TPUStrategy(resolver, built, layout_map=alone.LAYOUTS)
    model, x = alone.made(alone.mlp, "momentum", strategy)
    part = alone.part_of(model.get_layer("up").kernel)
    return strategy.num_replicas_in_sync, part, alone.outcome(model, x)


def refused():
    """The errors of strategies that can't be, as texts."""
    index = keras_dist.MultiWorkerMirroredStrategy().plan.cluster.index
    tpu = keras_dist.tpu.experimental
    resolver = keras_dist.cluster_resolver.TPUClusterResolver("virtual")
    topology = tpu.initialize_tpu_system(resolver)
    across = tpu.DeviceAssignment(
        topology, topology.device_coordinates[:, :1].reshape(1, 2, 4)
    )
    maps = [alone.LAYOUTS, COLUMNS]
    return {
        "count": attempted(in_cluster, 3),
        "maps": attempted(in_cluster, 2, "mirrored", maps[index]),
        "numbers": attempted(in_cluster, [2, 4][index]),
        "kinds": attempted(in_cluster, 2, ["mirrored", "variables"][index]),
        "cores": attempted(keras_dist.TPUStrategy, resolver, across),
        "after": in_cluster(2).num_replicas_in_sync,
    }


def verified():
    """What reports say: of numbers, of bytes kept and of bytes sent."""
    strategy, model, x = of_kind(("mlp", 2, "mirrored"))
    report = strategy.verify(model, x, alone.LABELS, batch_size=20)
    summary = keras_dist.summary(model)
    sent = [(each.between, each.total) for each in summary.transfers]
    return report.same, summary.rows[0].kept, summary.notes, sent
