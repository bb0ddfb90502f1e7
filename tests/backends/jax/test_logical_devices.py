"""Replicas of several logical devices compute one device's numbers in parts.

What is counted is in parts, too: bytes, collectives, programs.
"""

import functools
import re

import jax
import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

import keras_dist
from backends.jax import measures
from backends.jax import parts
from backends.jax import test_scans
from backends.jax.parts import ATTENTION
from backends.jax.parts import CLASSES
from backends.jax.parts import CROSSENTROPY
from backends.jax.parts import LABELS
from backends.jax.parts import LAYOUTS
from backends.jax.parts import WIDTH
from backends.jax.parts import X
from backends.jax.parts import logical as strategy
from backends.jax.parts import made
from backends.jax.parts import mlp
from backends.jax.parts import outcome
from backends.jax.parts import part_of
from keras_dist.plugins import Device
from keras_dist.plugins import Plan
from keras_dist_jax.sharding import shards
from parity.harness import assert_same
from parity.harness import state_of
from steps import classifier_step


def transformer():
    """A block whose attention has as many heads as there are devices."""
    inputs = keras.Input((parts.LENGTH,), dtype="int32")
    x = layers.Embedding(parts.WORDS, 32, name="words")(inputs)
    attention = layers.MultiHeadAttention(4, 8, use_bias=False, dropout=0.1)
    x = x + attention(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x)
    up = layers.Dense(64, activation="gelu", name="up")(x)
    x = layers.GlobalAveragePooling1D()(x + layers.Dense(32, name="down")(up))
    return keras.Model(inputs, layers.Dense(CLASSES)(x)), parts.TOKENS


SCANNED = {r".*stack(_\d+)?/kernel": (None, None, "logical")}


@pytest.mark.parametrize(
    ("make", "optimizer", "logical", "layout_map", "options"),
    [
        (mlp, "momentum", 4, LAYOUTS, {}),
        (mlp, "adafactor", 2, LAYOUTS, {}),
        (mlp, "adam", 2, LAYOUTS, {"optimizer_state": "sharded"}),
        (transformer, "adamw", 2, ATTENTION, {}),
        (transformer, "adamw", 2, ATTENTION, {"variables": "sharded"}),
        (test_scans.scanned_layers, "adam", 2, SCANNED, {}),
        (
            test_scans.scanned_layers,
            *("adam", 2, SCANNED, {"variables": "sharded"}),
        ),
    ],
)
def test_the_numbers_of_one_device(
    make, optimizer, logical, layout_map, options
):
    distributed = strategy(logical, layout_map, **options)
    assert distributed.num_replicas_in_sync == 4 // logical
    model = parts.assert_numbers_of_one_device(make, optimizer, distributed)
    if make is test_scans.scanned_layers:
        rows = 32 if "variables" in options else 64
        assert part_of(model.layers[1].kernel) == (6, rows, 32)


@pytest.mark.parametrize("logical", [2, 4])
def test_each_device_has_its_part_of_a_variable_and_its_slots(logical):
    model, x = made(mlp, "adam", strategy(logical))
    model.fit(x, LABELS, batch_size=20, verbose=0)
    parts = {
        variable.path.split("/", 1)[-1].removesuffix("_momentum"): (
            part_of(variable),
            [*home_of(variable).bytes_kept().values()],
        )
        for variable in [*model.variables, *model.optimizer.variables]
        if shards.is_sharded(variable) and "velocity" not in variable.path
    }
    up, bias, down = (16, 64 // logical), (64 // logical,), (64 // logical, 32)
    shapes = {name: shape for name, (shape, _) in parts.items()}
    assert shapes == {
        "kernel": down,
        "bias": bias,
        "up_kernel": up,
        "up_bias": bias,
        "down_kernel": down,
    }
    for shape, kept in parts.values():
        assert kept == [4 * np.prod(shape)] * 4


def home_of(variable):
    return variable.distribute_strategy.executor.storage(variable)


@pytest.mark.parametrize("what", ["variables", "optimizer_state"])
def test_replicas_divide_an_axis_that_is_left(what):
    distributed = strategy(2, **{what: "sharded"})
    model, _ = made(mlp, "adam", distributed)
    kernel = model.get_layer("up").kernel
    assert part_of(kernel) == ((8, 32) if what == "variables" else (16, 32))
    bias = model.get_layer("up").bias
    assert part_of(bias) == (32,)
    with distributed.scope():
        model.optimizer.build(model.trainable_variables)
    slot = next(v for v in model.optimizer.variables if "up_kernel" in v.path)
    assert part_of(slot) == (8, 32)
    assert distributed.devices_of(slot) == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")


def test_saved_and_loaded_bit_by_bit(tmp_path):
    """As a whole and in parts, with as many logical devices or not."""
    model, x = made(mlp, "adam", strategy(2))
    model.fit(x, LABELS, batch_size=20, verbose=0)
    model.save(tmp_path / "model.keras")
    keras_dist.save_sharded(model, tmp_path / "parts")
    plain = keras.saving.load_model(tmp_path / "model.keras")
    with strategy(4).scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    restored, _ = made(mlp, "adam", strategy(4))
    restored_plain, _ = made(mlp, "adam")
    for each in (restored, restored_plain):
        keras_dist.restore_sharded(each, tmp_path / "parts")
    for found in (plain, loaded, restored, restored_plain):
        assert_same(state_of(found), state_of(model), rtol=0, atol=0)
    for found in (loaded, restored):
        assert part_of(found.get_layer("up").kernel) == (16, 16)


def sums_of_rows(text, rows):
    """The shapes of what all-reduces sum that has so many rows."""
    results = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    return sorted(
        shape
        for result in results
        for shape in re.findall(r"f32\[([\d,]*)\]", result)
        if shape.startswith(f"{rows},")
    )


def test_a_pair_of_layers_sums_once_forward_and_once_backward():
    """The first layer's input has a gradient, too: it is not the batch."""
    keras.utils.set_random_seed(0)
    with strategy(2).scope():
        inputs = keras.Input((WIDTH,))
        x = layers.Dense(24, use_bias=False, name="first")(inputs)
        x = layers.Dense(64, activation="relu", name="up")(x)
        x = layers.Dense(40, use_bias=False, name="down")(x)
        model = keras.Model(inputs, layers.Dense(CLASSES)(x))
        model.compile("sgd", CROSSENTROPY)
    text = measures.text_of(measures.step_of(model, X[:16], LABELS[:16]))
    for kind in ("all-gather", "all-to-all", "collective-permute"):
        assert f" {kind}(" not in text
    # Of 8 rows a replica: the output of the second, the gradient of the first.
    assert sums_of_rows(text, 8) == ["8,24", "8,40"]


class Annotated(layers.Layer):
    """Annotates what it gets, in its call."""

    def __init__(self, distributed, parts):
        super().__init__()
        self.distributed, self.parts = distributed, parts

    def call(self, inputs):
        x, its = ops.sin(inputs), self.distributed
        if self.parts is None:
            x = its.experimental_replicate_to_logical_devices(x)
        else:
            x = its.experimental_split_to_logical_devices(x, self.parts)
        return its.experimental_assign_to_logical_device(ops.cos(x), 1)


def shapes_of_cosine(text):
    """The shapes of a device's part of what a program computes a cosine of."""
    found = re.findall(r"= f32\[(\d+),(\d+)\]\S* cosine\(", text)
    return {(int(rows), int(width)) for rows, width in found}


@pytest.mark.parametrize(
    ("logical", "parts", "expected"),
    [
        (2, [2, 1], (5, 32)),
        (2, None, (10, 32)),
        (4, [2, 2], (10, 16)),
        (4, [1, 4], (20, 8)),
    ],
)
def test_annotations_in_a_layer(logical, parts, expected):
    """The layer before divides its output, so that there is something to do."""
    losses, texts = [], []
    for count in (1, logical):
        keras.utils.set_random_seed(0)
        own = [1, 1] if count == 1 and parts else parts
        devices = 4 if count > 1 else 1
        layout_map = {".*wide/kernel": (None, "logical")}
        distributed = strategy(count, layout_map, devices)
        with distributed.scope():
            model = keras.Sequential(
                [
                    keras.Input((WIDTH,)),
                    layers.Dense(32, name="wide"),
                    Annotated(distributed, own)
                    if count > 1
                    else layers.Activation(lambda x: ops.cos(ops.sin(x))),
                    layers.Dense(CLASSES),
                ]
            )
            model.compile("sgd", CROSSENTROPY)
        program = measures.step_of(model, X[:20], LABELS[:20], 20)
        texts.append(measures.text_of(program))
        losses.append(model.evaluate(X, LABELS, verbose=0))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    # The derivative of the sine is one, too, of a tensor before.
    assert expected in shapes_of_cosine(texts[1])


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([1, 2], (22, 8)), ([2, 1], (11, 16)), (None, (22, 16))],
)
def test_annotations_in_a_function(numbers, expected):
    """Each replica annotates its own rows."""
    distributed = strategy(2, {})
    with distributed.scope():
        layer = Annotated(distributed, numbers)

    @keras_dist.function
    def annotated(x):
        return layer(x)

    (rows,) = parts.shares(distributed, X, rows=44)
    found = []
    (program,) = measures.compiled(
        "annotated",
        lambda: found.extend(distributed.run(annotated, (rows,)).values),
    )
    np.testing.assert_allclose(found[1], np.cos(np.sin(X[1::2])), rtol=1e-5)
    assert shapes_of_cosine(measures.text_of(program)) == {expected}


def test_outside_of_a_program_nothing_changes():
    distributed, x = strategy(2), ops.ones((4, 6))
    split = distributed.experimental_split_to_logical_devices

    def unchanged():
        assert split(x, [1, 2]) is x
        assert distributed.experimental_replicate_to_logical_devices(x) is x
        assert distributed.experimental_assign_to_logical_device(x, 1) is x

    unchanged()
    distributed.run(unchanged)
    jitted = jax.jit(lambda x: split(x, [2, 1]) + 1)(x)
    np.testing.assert_array_equal(jitted, np.ones((4, 6)) + 1)
    with pytest.raises(ValueError, match="from 0 to 1"):
        distributed.experimental_assign_to_logical_device(x, 2)
    with pytest.raises(ValueError, match="can't be split into 4"):
        split(x, [1, 4])


def trained_by_a_loop(distributed, is_compiled, rows):
    """The loss and weights after some steps of a loop of the user's own."""
    keras.utils.set_random_seed(0)
    with distributed.scope():
        inputs = keras.Input((WIDTH,))
        x = layers.Dense(64, activation="relu", name="up")(inputs)
        x = layers.Dense(32, name="down")(x)
        model = keras.Model(inputs, layers.Dense(CLASSES)(x))
        optimizer = parts.OPTIMIZERS["adamw"]()
        optimizer.build(model.trainable_variables)
    run = classifier_step(model, optimizer, global_batch_size=rows)
    if is_compiled:
        run = keras_dist.function(run)
    for start in (0, rows):
        batch = parts.shares(distributed, X[start:], LABELS[start:], rows=rows)
        loss = distributed.run(run, args=batch)
    total = distributed.reduce("SUM", loss, axis=None)
    return model, [np.asarray(total), *model.get_weights()]


@functools.cache
def loop_on_one_device(rows):
    one = keras_dist.OneDeviceStrategy("cpu:0")
    return trained_by_a_loop(one, False, rows)[1]


@pytest.mark.parametrize("rows", [20, 19])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("logical", [2, 4])
def test_a_loop_has_the_numbers_of_one_device(logical, is_compiled, rows):
    model, found = trained_by_a_loop(strategy(logical), is_compiled, rows)
    assert part_of(model.get_layer("up").kernel) == (16, 64 // logical)
    for own, theirs in zip(found, loop_on_one_device(rows), strict=True):
        np.testing.assert_allclose(own, theirs, rtol=1e-4, atol=1e-5)


def test_a_function_computes_with_parts():
    """It has no other whole value of a variable, and gathers none."""
    distributed = strategy(2)
    model, x = made(mlp, "adam", distributed)
    step = keras_dist.function(classifier_step(model, model.optimizer))
    batch = parts.shares(distributed, x, LABELS)
    (program,) = measures.compiled(
        "step", lambda: distributed.run(step, args=batch)
    )
    text = measures.text_of(program)
    assert "f32[16,32]" in text
    assert "f32[16,64]" not in text
    assert " all-gather(" not in text or "f32[64,32]" not in text


def test_a_model_that_was_made_before():
    """Its variables, and those of its optimizer, are divided where they are."""
    keras.utils.set_random_seed(0)
    model, x = made(mlp, "momentum")
    model.optimizer.build(model.trainable_variables)
    expected = outcome(*made(mlp, "momentum"))
    strategy(2).distribute(model)
    assert_same(outcome(model, x), expected, 1e-4)
    slots = [v for v in model.optimizer.variables if "up_kernel" in v.path]
    assert [part_of(v) for v in slots] == [(16, 32)]


def test_verify_compares_with_one_device():
    distributed = strategy(2)
    model, x = made(mlp, "momentum", distributed)
    assert distributed.verify(model, x, LABELS, batch_size=20).same


def test_a_summary_counts_each_logical_device():
    model, _ = made(mlp, "adam", strategy(2))
    found = keras_dist.summary(model)
    row = found.rows[0]
    assert (row.path, row.kind) == ("up/kernel", "sharded")
    assert row.kept == tuple((f"cpu:{i}", 16 * 32 * 4) for i in range(4))
    assert found.device_names == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")
    assert any("keras-dist plan --target" in note for note in found.notes)
    # Each device sums its half of some gradients, and all of the others, with
    # one other device.
    parts = (16 * 64 + 64 + 64 * 32) // 2 + 2 * 32 + 32 * CLASSES + CLASSES
    (transfer,) = found.transfers
    assert transfer.sent == tuple((f"cpu:{i}", 4 * parts) for i in range(4))
    assert found.bytes_sent == 4 * 4 * parts
    (alone, _) = made(mlp, "adam", strategy(4))
    assert keras_dist.summary(alone).transfers == ()
    assert "cpu:0+cpu:1, cpu:2+cpu:3" in repr(found) or found.strategy


def test_the_layout_map_of_keras():
    layout_map = keras.distribution.LayoutMap(
        keras.distribution.DeviceMesh(
            (2, 2), ("batch", "logical"), [f"cpu:{i}" for i in range(4)]
        )
    )
    layout_map[".*up/kernel"] = (None, "logical")
    model, _ = made(mlp, "adam", strategy(2, layout_map))
    assert part_of(model.get_layer("up").kernel) == (16, 32)
    with pytest.raises(
        ValueError, match=r"(?s)'logical': 2.*logical_devices=4"
    ):
        strategy(4, layout_map)


def test_one_logical_device_ignores_the_map():
    distributed = strategy(1)
    assert distributed.num_replicas_in_sync == 4
    model, _ = made(mlp, "adam", distributed)
    assert not any(map(shards.is_sharded, model.variables))


def test_the_cores_of_a_tpu():
    resolver = keras_dist.cluster_resolver.TPUClusterResolver("virtual")
    tpu = keras_dist.tpu.experimental
    assignment = tpu.DeviceAssignment.build(
        tpu.initialize_tpu_system(resolver),
        computation_shape=[1, 1, 1, 2],
        num_replicas=2,
    )
    distributed = keras_dist.TPUStrategy(
        resolver, assignment, layout_map=LAYOUTS
    )
    assert distributed.num_replicas_in_sync == 2
    model, x = made(mlp, "momentum", distributed)
    expected = outcome(*made(mlp, "momentum"))
    assert part_of(model.get_layer("up").kernel) == (16, 32)
    assert_same(outcome(model, x), expected, 1e-4)
    with pytest.raises(ValueError, match="num_cores_per_replica"):
        keras_dist.TPUStrategy(resolver, layout_map=LAYOUTS)


def test_a_pattern_that_names_no_variable():
    model, x = made(mlp, "adam", strategy(2, {**LAYOUTS, "upp/.*": ()}))
    with pytest.raises(ValueError, match=r"(?s)\['upp/\.\*'\].*whole `path`"):
        model.fit(x, LABELS, verbose=0)


@pytest.mark.parametrize(
    ("layout_map", "message"),
    [
        (
            {".*up/kernel": (None, "logical"), ".*/kernel": ("logical",)},
            "contradict each other about variable 'up/kernel'",
        ),
        (
            {".*up/kernel": (None, None, "logical")},
            r"more axes.*'up/kernel' of shape \(16, 64\).*at most 2",
        ),
        (
            {"dense(_1)?/bias": ("logical",)},
            r"can't divide.*shape \(5,\).*multiple of 2; axis 0 has 5",
        ),
    ],
)
def test_layouts_that_do_not_suit_a_variable(layout_map, message):
    keras.backend.clear_session(free_memory=False)
    with (
        strategy(2, layout_map).scope(),
        pytest.raises(ValueError, match=f"(?s){message}"),
    ):
        mlp()


def test_plans_that_no_mesh_has():
    cpus = tuple(Device("cpu", index) for index in range(4))
    with pytest.raises(keras_dist.DeviceError, match="as many for each"):
        keras_dist.Strategy(Plan((cpus[:2], cpus[2:3]), cpus[:3]))
