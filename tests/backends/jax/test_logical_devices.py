"""Replicas of several logical devices: the numbers, bytes and programs."""

import functools
import gc
import re

import jax
import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

import keras_dist
from backends.jax import test_scans
from backends.jax import test_sharded
from keras_dist.plugins import Device
from keras_dist.plugins import Plan
from keras_dist_jax.sharding import shards
from parity.harness import assert_same
from parity.harness import state_of

ROWS, WIDTH, CLASSES, LENGTH, WORDS = 44, 16, 5, 6, 50
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, WIDTH)).astype("float32")
TOKENS = RNG.integers(0, WORDS, (ROWS, LENGTH))
LABELS = RNG.integers(0, CLASSES, ROWS)
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
LAYOUTS = {
    r".*up/kernel": (None, "logical"),
    r".*up/bias": ("logical",),
    r".*down/kernel": ("logical", None),
}
ATTENTION = {
    **LAYOUTS,
    r".*/(query|key|value)/kernel": (None, "logical"),
    r".*/attention_output/kernel": ("logical",),
    r".*words/embeddings": (None, "logical"),
}


def strategy(logical_devices, layout_map=None, count=4, **options):
    return keras_dist.MirroredStrategy(
        [f"cpu:{index}" for index in range(count)],
        logical_devices=logical_devices,
        layout_map=LAYOUTS if layout_map is None else layout_map,
        **options,
    )


def mlp():
    """Two layers that a replica's devices divide, and others."""
    inputs = keras.Input((WIDTH,))
    x = layers.Dense(64, activation="relu", name="up")(inputs)
    x = layers.Dropout(0.1)(x)
    x = layers.Dense(32, use_bias=False, name="down")(x)
    x = layers.BatchNormalization()(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x)), X


def transformer():
    """A block whose attention has as many heads as there are devices."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 32, name="words")(inputs)
    attention = layers.MultiHeadAttention(4, 8, use_bias=False, dropout=0.1)
    x = x + attention(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x)
    up = layers.Dense(64, activation="gelu", name="up")(x)
    x = layers.GlobalAveragePooling1D()(x + layers.Dense(32, name="down")(up))
    return keras.Model(inputs, layers.Dense(CLASSES)(x)), TOKENS


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.005),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(
        0.005, global_clipnorm=0.5, weight_decay=0.1
    ),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "accumulation": lambda: keras.optimizers.Adam(
        0.005, gradient_accumulation_steps=2
    ),
}


def made(make, optimizer, distributed=None, **kwargs):
    """A compiled model, plain or under a strategy, and its inputs."""
    keras.utils.set_random_seed(0)

    def compiled():
        model, x = make()
        model.compile(OPTIMIZERS[optimizer](), CROSSENTROPY, **kwargs)
        return model, x

    if distributed is None:
        return compiled()
    with distributed.scope():
        return compiled()


def outcome(model, x):
    """The history, the evaluation, predictions and all variables."""
    options = {"batch_size": 20, "shuffle": False, "verbose": 0}
    history = model.fit(
        x, LABELS, epochs=2, validation_split=0.1, **options
    ).history
    history |= model.evaluate(x, LABELS, return_dict=True, verbose=0)
    return {
        **{name: np.array(value) for name, value in history.items()},
        "predictions": model.predict(x, verbose=0),
        **state_of(model),
    }


# The logical devices of a replica, and all devices.
BOTH = [(2, 4), (4, 4)]
RUNS = [
    (mlp, "adam", 2, 4, {}),
    (mlp, "momentum", 4, 4, {}),
    (mlp, "adamw", 2, 2, {}),
    (mlp, "adafactor", 2, 4, {}),
    (mlp, "accumulation", 2, 4, {"variables": "sharded"}),
    (mlp, "adam", 2, 4, {"optimizer_state": "sharded"}),
    (transformer, "adam", 2, 4, {}),
    (transformer, "momentum", 4, 4, {}),
    (transformer, "adamw", 2, 4, {}),
    (transformer, "adamw", 2, 4, {"variables": "sharded"}),
]


@pytest.mark.parametrize(
    ("make", "optimizer", "logical", "count", "options"),
    [
        pytest.param(
            *run, id="-".join([run[0].__name__, *map(str, run[1:4]), *run[4]])
        )
        for run in RUNS
    ],
)
def test_the_numbers_of_one_device(make, optimizer, logical, count, options):
    """With batches of 20 and 19 rows: one divides, and one does not."""
    expected = outcome(*made(make, optimizer, metrics=["accuracy"]))
    layout_map = ATTENTION if make is transformer else LAYOUTS
    distributed = strategy(logical, layout_map, count, **options)
    assert distributed.num_replicas_in_sync == count // logical
    found = made(make, optimizer, distributed, metrics=["accuracy"])
    assert any(map(shards.is_sharded, found[0].trainable_variables))
    # Adam divides by the roots of squares near zero.
    rtol = 1e-4 if optimizer == "momentum" else 1e-3
    assert_same(outcome(*found), expected, rtol)


@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
def test_layers_in_a_scan(variables):
    def trained(distributed=None):
        if distributed is None:
            return test_scans.outcome(test_scans.model_of(test_scans.scanned))
        with distributed.scope():
            model = test_scans.model_of(test_scans.scanned)
        part = (6, 32 if variables == "sharded" else 64, 32)
        assert part_of(model.layers[0].kernel) == part
        return test_scans.outcome(model)

    layout_map = {r".*stack(_\d+)?/kernel": (None, None, "logical")}
    distributed = strategy(2, layout_map, variables=variables)
    assert_same(trained(distributed), trained(), 1e-3)


def part_of(variable):
    """The shape of the part on a device."""
    return shards.stored(variable).addressable_shards[0].data.shape


@pytest.mark.parametrize(("logical", "count"), BOTH)
def test_each_device_has_its_part_of_a_variable_and_its_slots(logical, count):
    model, x = made(mlp, "adam", strategy(logical, count=count))
    model.fit(x, LABELS, batch_size=20, verbose=0)
    parts = {
        variable.path.split("/", 1)[-1].removesuffix("_momentum"): (
            part_of(variable),
            strategy_bytes(model, variable),
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
        assert kept == [4 * np.prod(shape)] * count


def strategy_bytes(model, variable):
    storage = variable.distribute_strategy.executor.storage(variable)
    return [*storage.bytes_kept().values()]


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


def stack():
    inputs = keras.Input((64,))
    x = inputs
    for _ in range(6):
        x = layers.Dense(128, name=None)(x)
        x = layers.Dense(64)(x)
    return keras.Model(inputs, x)


EVERY = {r"dense(_\d*[02468])?/kernel": (None, "logical")} | {
    r"dense_\d*[13579]/kernel": ("logical", None)
}


@pytest.mark.parametrize("logical", [2, 4])
def test_no_device_ever_has_the_whole_model(monkeypatch, logical):
    """From the first variable to the slots, and in the steps."""
    monkeypatch.setattr(shards.Shards, "put", refuse)
    original, seen = keras.Variable.__init__, []

    def counted(self, *args, **kwargs):
        original(self, *args, **kwargs)
        seen.append(test_sharded.bytes_on_each().max())

    keras.backend.clear_session(free_memory=False)
    gc.collect()
    before = test_sharded.bytes_on_each().max()
    monkeypatch.setattr(keras.Variable, "__init__", counted)
    with strategy(logical, EVERY).scope():
        model = stack()
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    state = [*model.variables, *model.optimizer.variables]
    small = sum(4 * v.value.size for v in state if not shards.is_sharded(v))
    parts = sum(
        4 * int(np.prod(part_of(v))) for v in state if shards.is_sharded(v)
    )
    whole = sum(4 * int(np.prod(v.shape)) for v in state)
    assert logical * parts + small == whole
    assert max(seen) - before <= (parts + small) * 1.02

    class Measure(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(test_sharded.bytes_on_each().max())

    del seen[:]
    x = np.ones((3 * test_sharded.BATCH_SIZE, 64), "float32")
    model.fit(
        x,
        x,
        batch_size=test_sharded.BATCH_SIZE,
        verbose=0,
        callbacks=[Measure()],
    )
    assert max(seen) - before <= (parts + small) * 1.02 + 1024


def refuse(self, value):
    raise AssertionError("A whole value was divided or placed.")


def test_reading_takes_no_device(monkeypatch):
    model, _ = made(mlp, "adam", strategy(2))
    monkeypatch.setattr(shards.Shards, "placed", refuse)
    for variable, value in zip(model.weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
        np.testing.assert_array_equal(ops.convert_to_numpy(variable), value)


@pytest.mark.parametrize("logical", [2, 4])
def test_what_was_assigned_is_what_is_read(logical):
    model, x = made(mlp, "adam", strategy(logical))
    model.fit(x, LABELS, verbose=0)
    changed = [value + 1.0 for value in model.get_weights()]
    model.set_weights(changed)
    for variable, value in zip(model.weights, changed, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    kernel = model.get_layer("up").kernel
    kernel.assign_add(ops.ones(kernel.shape))
    np.testing.assert_array_equal(kernel.numpy(), changed[0] + 1.0)
    assert part_of(kernel) == (16, 64 // logical)
    with pytest.raises(ValueError, match="must match"):
        kernel.assign(np.zeros((2, 2)))


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_saved_and_loaded_bit_by_bit(tmp_path, name):
    model, x = made(transformer, "adam", strategy(2, ATTENTION))
    model.fit(x, LABELS, batch_size=20, verbose=0)
    path, expected = tmp_path / name, model.get_weights()
    if name == "model.keras":
        model.save(path)
        plain = keras.saving.load_model(path)
        with strategy(4, ATTENTION).scope():
            loaded = keras.saving.load_model(path)
        slot = loaded.optimizer.variables[2]
        np.testing.assert_array_equal(
            slot.numpy(), model.optimizer.variables[2].numpy()
        )
    else:
        model.save_weights(path)
        plain, _ = made(transformer, "adam")
        loaded, _ = made(transformer, "adam", strategy(4, ATTENTION))
        for each in (plain, loaded):
            each.optimizer.build(each.trainable_variables)
        plain.load_weights(path)
        loaded.load_weights(path)
    assert part_of(loaded.get_layer("up").kernel) == (32, 16)
    for found in (plain, loaded):
        for own, theirs in zip(found.get_weights(), expected, strict=True):
            np.testing.assert_array_equal(own, theirs)
    np.testing.assert_allclose(
        loaded.predict(x, verbose=0),
        plain.predict(x, verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_checkpoint_in_parts_suits_other_logical_devices(tmp_path):
    model, x = made(transformer, "adam", strategy(2, ATTENTION))
    model.fit(x, LABELS, batch_size=20, verbose=0)
    keras_dist.save_sharded(model, tmp_path / "model")
    for distributed in (strategy(4, ATTENTION), None):
        other, _ = made(transformer, "adam", distributed)
        keras_dist.restore_sharded(other, tmp_path / "model")
        for own, theirs in zip(
            other.get_weights(), model.get_weights(), strict=True
        ):
            np.testing.assert_array_equal(own, theirs)
        if distributed is not None:
            assert part_of(other.get_layer("up").kernel) == (32, 16)


def live_programs(name):
    live = jax.devices()[0].client.live_executables()
    return [each for each in live if each.hlo_modules()[0].name == name]


def text_of_step(model, x, rows=16):
    before = live_programs("jit_train_step")
    model.fit(x[:rows], LABELS[:rows], batch_size=rows, verbose=0)
    (program,) = [
        each for each in live_programs("jit_train_step") if each not in before
    ]
    return program.hlo_modules()[0].to_string()


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
    text = text_of_step(model, X)
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
        (2, [1, 2], (10, 16)),
        (2, [2, 1], (5, 32)),
        (2, None, (10, 32)),
        (4, [2, 2], (10, 16)),
        (4, [1, 4], (20, 8)),
        (4, [4, 1], (5, 32)),
        (4, None, (20, 32)),
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
        texts.append(text_of_step(model, X, 20))
        losses.append(model.evaluate(X, LABELS, verbose=0))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    # The derivative of the sine is one, too, of a tensor before.
    assert expected in shapes_of_cosine(texts[1])


@pytest.mark.parametrize(
    ("parts", "expected"),
    [([1, 2], (22, 8)), ([2, 1], (11, 16)), (None, (22, 16))],
)
def test_annotations_in_a_function(parts, expected):
    """Each replica annotates its own rows."""
    distributed = strategy(2, {})
    with distributed.scope():
        layer = Annotated(distributed, parts)

    @keras_dist.function
    def annotated(x):
        return layer(x)

    rows = distributed.experimental_distribute_values_from_function(
        lambda context: X[context.replica_id_in_sync_group :: 2]
    )
    before = {*live_programs("jit_annotated")}
    found = distributed.run(annotated, args=(rows,)).values
    np.testing.assert_allclose(found[1], np.cos(np.sin(X[1::2])), rtol=1e-5)
    (program,) = {*live_programs("jit_annotated")} - before
    text = program.hlo_modules()[0].to_string()
    assert shapes_of_cosine(text) == {expected}


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
    count = distributed.num_replicas_in_sync
    with distributed.scope():
        inputs = keras.Input((WIDTH,))
        x = layers.Dense(64, activation="relu", name="up")(inputs)
        x = layers.Dense(32, name="down")(x)
        model = keras.Model(inputs, layers.Dense(CLASSES)(x))
        optimizer = OPTIMIZERS["adamw"]()
        optimizer.build(model.trainable_variables)

    def step(x, y):
        def loss_fn():
            losses = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            return keras_dist.compute_average_loss(
                losses, global_batch_size=rows
            )

        loss, gradients = keras_dist.value_and_grad(
            loss_fn, model.trainable_variables
        )
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    run = keras_dist.function(step) if is_compiled else step
    for start in (0, rows):
        every = slice(start, start + rows)
        batch = distributed.experimental_distribute_values_from_function(
            lambda context, every=every: (
                X[every][context.replica_id_in_sync_group :: count],
                LABELS[every][context.replica_id_in_sync_group :: count],
            )
        )
        loss = distributed.run(run, args=batch)
    total = distributed.reduce("SUM", loss, axis=None)
    return model, [np.asarray(total), *model.get_weights()]


@functools.cache
def loop_on_one_device(rows):
    return trained_by_a_loop(
        keras_dist.OneDeviceStrategy("cpu:0"), False, rows
    )[1]


@pytest.mark.parametrize("rows", [20, 19])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("logical", [2, 4])
def test_a_loop_has_the_numbers_of_one_device(
    monkeypatch, logical, is_compiled, rows
):
    expected = loop_on_one_device(rows)
    if is_compiled and rows == 20:  # else it runs uncompiled
        monkeypatch.setattr(shards.Shards, "placed", refuse)
    model, found = trained_by_a_loop(strategy(logical), is_compiled, rows)
    assert part_of(model.get_layer("up").kernel) == (16, 64 // logical)
    for own, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=1e-4, atol=1e-5)


def test_a_function_computes_with_parts():
    """It has no other whole value of a variable, and gathers none."""
    before = {*live_programs("jit_step")}
    trained_by_a_loop(strategy(2), True, 20)
    (program,) = {*live_programs("jit_step")} - before
    text = program.hlo_modules()[0].to_string()
    assert "f32[16,32]" in text
    assert "f32[16,64]" not in text
    assert " all-gather(" not in text or "f32[64,32]" not in text


def test_a_failed_step_loses_nothing():
    def fail(y):
        calls.append(0)
        if len(calls) > 3:
            raise OSError("no more labels")
        return np.float32(0)

    def failing(y, p):
        shape = jax.ShapeDtypeStruct((), "float32")
        return ops.zeros((), "float32") + jax.pure_callback(fail, shape, y)

    calls = []
    model, x = made(mlp, "adam", strategy(2), metrics=[failing])
    before = model.get_weights()
    with pytest.raises(OSError, match="no more labels"):
        model.fit(x, LABELS, batch_size=11, verbose=0)
    for own, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(own, theirs)
    assert part_of(model.get_layer("up").kernel) == (16, 32)


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
    with pytest.raises(ValueError, match=r"'logical': 2.*logical_devices=4"):
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
    with pytest.raises(ValueError, match=r"\['upp/\.\*'\].*whole `path`"):
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
        pytest.raises(ValueError, match=message),
    ):
        mlp()


def test_plans_that_no_mesh_has():
    cpus = tuple(Device("cpu", index) for index in range(4))
    with pytest.raises(keras_dist.DeviceError, match="as many for each"):
        keras_dist.Strategy(Plan((cpus[:2], cpus[2:3]), cpus[:3]))
