"""Workers whose replicas have several devices train as one device does."""

import functools
import pathlib

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.core.variable_layouts import VariableLayouts
from parity import cases
from parity import harness
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import state_of
from parity.test_logical_devices import last_even_axis
from workers import clusters
from workers.clusters import on_workers
from workers.jobs import attempted

pytestmark = pytest.mark.only_on(
    "jax", reason="Replicas have one device on the others."
)
if BACKEND == "jax":
    from backends.jax import test_logical_devices as alone
    from keras_dist_jax.placement import arrays
    from keras_dist_jax.sharding import shards

    MODELS = {"mlp": alone.mlp, "transformer": alone.transformer}
    MAPS = {"mlp": alone.LAYOUTS, "transformer": alone.ATTENTION}

CASES = {case.name: case for case in cases.CASES}
NAMES = [
    *("weighted", "batch_norm_conv_adam", "optimizer_global_clipnorm"),
    *("optimizer_ema", "layer_frozen", "mixed_float16"),
]
# A model, the logical devices of a replica, and what its replicas divide.
MLP, WHOLE_WORKER = ("mlp", 2, "mirrored"), ("mlp", 4, "mirrored")
SHARDED = ("transformer", 2, "variables")
RUNS = [
    (MLP, "adam"),
    (WHOLE_WORKER, "momentum"),
    (("mlp", 2, "optimizer_state"), "adamw"),
    (("transformer", 2, "mirrored"), "adamw"),
    (("transformer", 4, "variables"), "momentum"),
    (SHARDED, "adam"),
]


def launched(job, *args):
    return clusters.run(job, args, workers=2, devices=4, timeout=500)


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
    strategy = in_cluster(logical, what, MAPS[name])
    return strategy, *alone.made(
        MODELS[name], optimizer, strategy, metrics=["accuracy"]
    )


@functools.cache
def plain(name, optimizer):
    made = alone.made(MODELS[name], optimizer, metrics=["accuracy"])
    return alone.outcome(*made)


def train(kind, optimizer):
    """What a model has at the end, and the parts that a device has."""
    _, model, x = of_kind(kind, optimizer)
    found = alone.outcome(model, x)
    sharded = [v for v in model.weights if shards.is_sharded(v)]
    return found, {v.path: alone.part_of(v) for v in sharded}


@pytest.mark.parametrize(
    ("kind", "optimizer"), RUNS, ids=["-".join(map(str, r[0])) for r in RUNS]
)
def test_the_numbers_of_one_device(kind, optimizer):
    """With batches of 20 and 19 rows: one divides, and one does not."""
    name, logical, what = kind
    for found, parts in launched(train, kind, optimizer):
        # Adam divides by the roots of squares near zero.
        rtol = 1e-4 if optimizer == "momentum" else 1e-3
        assert_same(found, plain(name, optimizer), rtol)
        rows = 16 if name == "mlp" else 32
        if what == "variables":  # the replicas of all workers divide rows
            rows //= 8 // logical
        assert parts["up/kernel"] == (rows, 64 // logical)


def train_case(what, name):
    """The outcome of a case of the parity table, all of it in parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VariableLayouts, "axes_of", last_even_axis)
        patch.setattr(shards, "LEAST_ELEMENTS", 1)
        strategy = in_cluster(2, what, {})
        return harness.train(CASES[name], 4, lambda num_replicas: strategy)


@pytest.mark.parametrize("what", ["mirrored", "variables"])
@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_of_a_case(name, what):
    """All of its variables that can be are in parts."""
    case = CASES[name]
    for outcome in launched(train_case, what, name):
        assert_same(outcome, harness.plain(case), case.rtol)


def few_rows(kind, rows, epochs=2, size=None):
    """What a model has after batches that replicas can't divide; without
    epochs, after steps that are not compiled."""
    _, model, x = of_kind(kind)
    return trained_on(model, x, rows, epochs, size)


def trained_on(model, x, rows, epochs=2, size=None):
    model.run_eagerly = not epochs
    y = alone.LABELS[:rows]
    model.fit(x[:rows], y, size or rows, epochs or 1, verbose=0)
    return state_of(model)


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        # 13 do not divide equally, and there are fewer than 4 replicas.
        *((kind, (13,)) for kind in (MLP, WHOLE_WORKER, SHARDED)),
        *((kind, (3,)) for kind in (MLP, WHOLE_WORKER, SHARDED)),
        # Steps that are not compiled.
        (MLP, (26, 0, 13)),
        (("mlp", 2, "variables"), (26, 0, 13)),
    ],
)
def test_few_rows_and_steps_that_are_not_compiled(kind, args):
    model, x = alone.made(MODELS[kind[0]], "momentum")
    expected = trained_on(model, x, *args)
    for found in launched(few_rows, kind, *args):
        assert_same(found, expected, 1e-4)


def parts_of(array):
    parts = array.addressable_shards
    return {each.device.id: np.asarray(each.data) for each in parts}


@pytest.mark.parametrize("kind", [MLP, SHARDED, ("mlp", 4, "optimizer_state")])
@on_workers(devices=4)
def test_parts_come_back_from_host_memory(kind):
    _, model, x = of_kind(kind)
    model.fit(x, alone.LABELS, batch_size=20, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    sharded = [v for v in variables if shards.is_sharded(v)]
    assert sharded
    for variable in sharded:
        array, own = shards.stored(variable), shards.shards_of(variable)
        found, expected = own.put_own(arrays.own_shard(array)), parts_of(array)
        assert parts_of(found).keys() == expected.keys()
        for device, part in parts_of(found).items():
            np.testing.assert_array_equal(part, expected[device])


def loop(logical, is_compiled, rows):
    """The weights after a loop of the user's own."""
    strategy = in_cluster(logical, "mirrored", alone.LAYOUTS)
    return alone.trained_by_a_loop(strategy, is_compiled, rows)[1]


@pytest.mark.parametrize(
    ("logical", "is_compiled", "rows"),
    [(2, True, 20), (2, True, 18), (4, True, 19), (2, False, 19)],
)
def test_a_loop_has_the_numbers_of_one_device(logical, is_compiled, rows):
    expected = alone.loop_on_one_device(rows)
    for found in launched(loop, logical, is_compiled, rows):
        for own, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, theirs, rtol=1e-4, atol=1e-5)


def same(found, expected):
    assert_same(found, expected, rtol=0, atol=0)


def save(kind, folder):
    """Trains, saves in each way there is, and sets weights; the state."""
    strategy, model, x = of_kind(kind)
    own = folder / str(strategy.plan.cluster.index)
    own.mkdir()
    checkpoint = keras.callbacks.ModelCheckpoint(
        str(own / "each" / "{epoch}.keras"), save_best_only=True
    )
    model.fit(
        *(x, alone.LABELS, 20),
        validation_split=0.2,
        verbose=0,
        callbacks=[checkpoint],
    )
    saved = state_of(model)
    model.save(str(own / "model.keras"))
    model.save_weights(str(own / "some.weights.h5"))
    keras_dist.save_sharded(model, folder / "parts")
    # If replicas don't divide it, each worker has all parts of a variable.
    if kind[2] == "mirrored" and strategy.plan.is_chief:
        model.get_layer("up").kernel.numpy()
    weights = model.get_weights()
    model.set_weights([np.zeros_like(each) for each in weights])
    assert not any(abs(each).max() for each in model.get_weights())
    model.set_weights(weights)
    same(state_of(model), saved)
    # The chief alone writes.
    files = {p.relative_to(own) for p in own.rglob("*") if p.is_file()}
    if strategy.plan.is_chief:
        names = ("model.keras", "some.weights.h5")
        assert {*map(pathlib.Path, names)} <= files
    else:
        assert not files
    return saved


def load(kind, folder, saved):
    """Loads what `save` has written; the state a training later."""
    strategy, model, x = of_kind(kind)
    keras_dist.restore_sharded(model, folder / "parts")
    same(state_of(model), saved)
    model.fit(x, alone.LABELS, batch_size=20, verbose=0)
    with strategy.scope():
        loaded = keras.models.load_model(str(folder / "0" / "model.keras"))
    same(state_of(loaded), saved)
    part = alone.part_of(loaded.get_layer("up").kernel)
    assert part[1] == 64 // kind[1]
    _, weights, _ = of_kind(kind)
    weights.optimizer.build(weights.trainable_variables)
    weights.load_weights(str(folder / "0" / "some.weights.h5"))
    for key, value in state_of(weights).items():
        if key.startswith("weights"):
            np.testing.assert_array_equal(value, saved[key])
    return state_of(model)


@pytest.mark.parametrize(
    ("saving", "loading"),
    [(MLP, [WHOLE_WORKER, ("mlp", 2, "variables")]), (SHARDED, [SHARDED])],
    ids=["mirrored", "sharded"],
)
def test_saved_by_some_and_loaded_by_others(saving, loading, tmp_path):
    saved, other = launched(save, saving, tmp_path)
    same(other, saved)
    same(state_of(keras.models.load_model(tmp_path / "0/model.keras")), saved)
    name = saving[0]
    for strategy in None, alone.strategy(4, MAPS[name]):
        model, _ = alone.made(MODELS[name], "momentum", strategy)
        keras_dist.restore_sharded(model, tmp_path / "parts")
        same(state_of(model), saved)
    gone_on = [
        state
        for kind in loading
        for state in launched(load, kind, tmp_path, saved)
    ]
    for state in gone_on[1:]:
        assert_same(state, gone_on[0], 1e-4)


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


@pytest.mark.parametrize(
    ("shape", "replicas"), [([1, 1, 1, 2], 4), ([2, 1, 1, 2], 2)]
)
def test_the_cores_of_a_tpu(shape, replicas):
    expected = alone.outcome(*alone.made(alone.mlp, "momentum"))
    for count, part, found in launched(cores, shape):
        assert (count, part) == (replicas, (16, 64 * replicas // 8))
        assert_same(found, expected, 1e-4)


@on_workers(devices=4)
def test_what_can_not_be_is_refused_on_all_workers():
    index = keras_dist.MultiWorkerMirroredStrategy().plan.cluster.index
    columns = {**alone.LAYOUTS, r".*up/kernel": ("logical", None)}
    error = attempted(in_cluster, 3)
    assert error.startswith("DeviceError: ")
    assert "logical_devices=3 and 4 device(s)" in error
    for args, texts in (
        (
            (2, "mirrored", [alone.LAYOUTS, columns][index]),
            ["up/kernel': (None, ", "up/kernel': ('logical', "],
        ),
        (([2, 4][index],), ["2 logical device(s)", "4 logical device(s)"]),
        (
            (2, ["mirrored", "variables"][index]),
            ["variables='mirrored'", "variables='sharded'"],
        ),
    ):
        error = attempted(in_cluster, *args)
        assert error.startswith("ClusterError: All workers have to")
        assert all(text in error for text in texts)
    tpu = keras_dist.tpu.experimental
    resolver = keras_dist.cluster_resolver.TPUClusterResolver("virtual")
    topology = tpu.initialize_tpu_system(resolver)
    across = topology.device_coordinates[:, :1].reshape(1, 2, 4)
    built = tpu.DeviceAssignment(topology, across)
    error = attempted(keras_dist.TPUStrategy, resolver, built)
    assert error.startswith("DeviceError: ")
    assert "replica 0 with cores of the hosts [0, 1]" in error
    assert in_cluster(2).num_replicas_in_sync == 4


@on_workers(devices=4)
def test_reports_of_a_model():
    """They are of numbers, of bytes kept and of bytes sent."""
    strategy, model, x = of_kind(MLP)
    assert strategy.verify(model, x, alone.LABELS, batch_size=20).same
    summary = keras_dist.summary(model)
    kept = tuple((f"cpu:{i}", 16 * 32 * 4) for i in range(4))
    assert summary.rows[0].kept == kept
    assert any("keras-dist plan --target" in note for note in summary.notes)
    total = 4 * ((16 * 64 + 64 + 64 * 32) + 2 * (2 * 32 + 32 * 5 + 5))
    # A worker sends what one of its replicas has.
    sent = [(each.between, each.total) for each in summary.transfers]
    assert sent == [("devices", 4 * total), ("workers", 2 * total)]
