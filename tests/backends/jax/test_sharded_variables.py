"""`variables="sharded"` computes one device's numbers with parts of variables.

Counted are bytes, collectives and programs. Where logical devices have parts
of variables, the same holds.
"""

import functools
import gc

import jax
import keras
import numpy as np
import pytest
from keras import initializers
from keras import layers
from keras import ops

import keras_dist
from backends.jax import measures
from backends.jax import parts
from backends.jax.parts import CLASSES
from backends.jax.parts import LABELS
from backends.jax.parts import convnet
from backends.jax.parts import recurrent
from backends.jax.parts import sharded
from backends.jax.parts import transformer
from keras_dist_jax.sharding import shards
from parity.harness import assert_same
from parity.harness import dtype_policy
from parity.harness import state_of
from steps import classifier_step
from steps import train_step


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


def adapted():
    inputs = keras.Input((48,))
    dense = layers.Dense(64, name="adapted")
    x = dense(layers.Dense(64)(inputs))
    dense.enable_lora(20)
    return keras.Model(inputs, layers.Dense(CLASSES)(x)), parts.SERIES.reshape(
        -1, 48
    )


@pytest.mark.parametrize(
    ("make", "optimizer", "num_replicas", "rtol"),
    [
        nightly(functools.partial(transformer, remat=True), "adamw", 2, 1e-4),
        nightly(transformer, "muon", 4, 2e-3),
        (convnet, "momentum", 4, 1e-4),
        (convnet, "lamb", 2, 1e-3),
        (recurrent, "scaled", 4, 1e-4),
        nightly(recurrent, "adafactor", 3, 1e-3),
        (adapted, "momentum", 4, 1e-4),
    ],
)
def test_the_numbers_of_one_device(make, optimizer, num_replicas, rtol):
    model = parts.assert_numbers_of_one_device(
        make, optimizer, sharded(num_replicas), rtol
    )
    if make is adapted:
        assert shards.is_sharded(model.get_layer("adapted").lora_kernel_a)


def test_bfloat16():
    losses = []
    for strategy in (None, sharded()):
        with dtype_policy("mixed_bfloat16"):
            model, x = parts.made(transformer, "adam", strategy)
        history = model.fit(x, LABELS, batch_size=20, epochs=2, verbose=0)
        losses.append(history.history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=5e-3)


INITIALIZERS = [
    "zeros",
    "ones",
    "glorot_uniform",
    "he_normal",
    "random_normal",
    "truncated_normal",
    "random_uniform",
    "orthogonal",
    "identity",
    initializers.Constant(0.5),
    initializers.RandomNormal(seed=3),
    initializers.RandomNormal(seed=keras.random.SeedGenerator(5)),
]


@pytest.mark.parametrize("shape", [(40, 30), (33, 33)])
@pytest.mark.parametrize("initializer", INITIALIZERS, ids=str)
def test_initial_values_are_those_of_one_device(initializer, shape):
    if initializer == "identity" and shape[0] != shape[1]:
        shape = (34, 34)
    values = []
    for strategy in (keras_dist.OneDeviceStrategy("cpu:0"), sharded()):
        keras.utils.set_random_seed(0)
        its = initializer
        if not isinstance(its, str):
            its = type(its).from_config(its.get_config())
        with strategy.scope():
            values.append(keras.Variable(its, shape=shape, dtype="float32"))
            values.append(keras.Variable(its, shape=shape, dtype="float32"))
    assert shards.is_sharded(values[2])
    for own, theirs in zip(values[2:], values[:2], strict=True):
        # The compiler may round a product and a sum once, in a whole program.
        np.testing.assert_allclose(
            own.numpy(), theirs.numpy(), rtol=1e-6, atol=1e-7
        )


def stack():
    inputs = keras.Input((64,))
    x = inputs
    for _ in range(6):
        x = layers.Dense(128)(x)
        x = layers.Dense(64)(x)
    return keras.Model(inputs, x)


EVERY = {r"dense(_\d*[02468])?/kernel": (None, "logical")} | {
    r"dense_\d*[13579]/kernel": ("logical", None)
}


@pytest.mark.parametrize(
    ("count", "make"),
    [
        (2, sharded),
        (4, sharded),
        (2, lambda count: parts.logical(count, EVERY)),
        (4, lambda count: parts.logical(count, EVERY)),
    ],
)
def test_no_device_ever_has_the_whole_model(monkeypatch, count, make):
    """From the first variable to the slots, and between steps."""
    monkeypatch.setattr(shards.Shards, "put", parts.refuse)
    original, seen = keras.Variable.__init__, []

    def counted(self, *args, **kwargs):
        original(self, *args, **kwargs)
        seen.append(measures.bytes_on_each().max())

    keras.backend.clear_session(free_memory=False)
    gc.collect()
    before = measures.bytes_on_each().max()
    monkeypatch.setattr(keras.Variable, "__init__", counted)
    with make(count).scope():
        model = stack()
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    state = [*model.variables, *model.optimizer.variables]
    large = [v for v in state if shards.is_sharded(v)]
    # 12 kernels and two slots of each; with replicas, biases of 128 too.
    assert len(large) >= 36
    share = sum(4 * int(np.prod(parts.part_of(v))) for v in large)
    small = sum(4 * v.value.size for v in state if not shards.is_sharded(v))
    assert count * share + small == measures.size_of(state)
    assert max(seen) - before <= (share + small) * 1.02

    class Measure(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(measures.bytes_on_each().max())

    del seen[:]
    size = measures.BATCH_SIZE
    x = np.ones((3 * size, 64), "float32")
    model.fit(x, x, batch_size=size, verbose=0, callbacks=[Measure()])
    assert max(seen) - before <= (share + small) * 1.02 + 1024


@pytest.mark.parametrize("remat", [False, True])
def test_each_variable_is_gathered_where_it_is_used(remat):
    """Once, or for a block that is computed again, twice; and summed once."""
    make = functools.partial(transformer, remat, width=64)
    model, x = parts.made(make, "adam", sharded())
    program = measures.step_of(model, x[:16], LABELS[:16])
    found = measures.collectives_in(program)
    large = [v for v in model.trainable_variables if shards.is_large(v)]
    whole = measures.size_of(large)
    blocks = measures.size_of(v for v in large if "block" in v.path)
    total = measures.size_of(model.trainable_variables)
    assert {kind for kind, _ in found} == {"all-gather", "all-reduce"}
    expected = whole + blocks if remat else whole
    gathered = measures.bytes_sent(found, "all-gather")
    assert gathered == pytest.approx(expected, rel=0.05)
    assert total <= measures.bytes_sent(found, "all-reduce") <= total + 1024


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (recurrent, lambda: sharded(3)),
        (parts.mlp, lambda: parts.logical(2)),
        (parts.mlp, lambda: parts.logical(4)),
    ],
)
def test_reading_and_assigning(monkeypatch, make, strategy):
    """Reading takes no device: it is one variable at a time, on the host."""
    model, x = parts.made(make, "adam", strategy())
    model.fit(x, LABELS, verbose=0)
    changed = [value + 1.0 for value in model.get_weights()]
    model.set_weights(changed)
    kernel = next(filter(shards.is_sharded, model.weights))
    part = parts.part_of(kernel)
    kernel.assign_add(ops.ones(kernel.shape))
    with pytest.raises(ValueError, match="must match"):
        kernel.assign(np.zeros((2, 2)))
    assert parts.part_of(kernel) == part != kernel.shape
    monkeypatch.setattr(shards.Shards, "placed", parts.refuse)
    for variable, value in zip(model.weights, changed, strict=True):
        expected = value + 1.0 if variable is kernel else value
        for found in (
            variable.numpy(),
            np.asarray(variable),
            ops.convert_to_numpy(variable),
        ):
            np.testing.assert_array_equal(found, expected)


def toggled(model, x):
    """Trains, freezes a layer and trains, and frees it again."""
    layer = model.layers[1]
    for trainable in (True, False, True):
        layer.trainable = trainable
        model.compile(parts.OPTIMIZERS["momentum"](), parts.CROSSENTROPY)
        model.fit(x, LABELS, batch_size=20, shuffle=False, verbose=0)
    return state_of(model)


def test_layers_that_are_frozen_for_a_while():
    expected = toggled(*parts.made(convnet, "momentum"))
    found = toggled(*parts.made(convnet, "momentum", sharded()))
    assert_same(found, expected, 1e-4)


def trained_by_hand(make, optimizer, way, chosen, sharded):
    """The losses, weights and slots after four steps of a loop."""
    keras.utils.set_random_seed(0)
    with chosen.scope():
        model, x = make()
        optimizer = parts.OPTIMIZERS[optimizer]()
        optimizer.build(model.trainable_variables)

    step = classifier_step(model, optimizer)
    run = step if way == "run" else keras_dist.function(step)
    ends = np.cumsum([8, 8, 13, 7])  # 13 and 7 are shared unequally
    batches = zip(*(np.split(a, ends[:-1]) for a in (x, LABELS)), strict=True)
    iterator = iter(chosen.experimental_distribute_dataset([*batches]))
    losses = []
    if way == "scan":
        found = keras_dist.scan_steps(run, iterator, len(ends))
        losses.append(
            sum(map(np.asarray, chosen.experimental_local_results(found)))
        )
    else:
        for batch in iterator:
            loss = chosen.run(run, args=batch)
            losses.append(chosen.reduce("SUM", loss, axis=None))
    state = [*model.weights, *optimizer.variables]
    assert any(map(shards.is_sharded, state)) == sharded
    return [np.ravel(losses), *(variable.numpy() for variable in state)]


@pytest.mark.parametrize(
    ("make", "optimizer", "way", "count"),
    [
        # What is not compiled together is compiled for each device.
        nightly(parts.mlp, "accumulation", "run", 2),
        nightly(transformer, "adamw", "function", 4),
        (convnet, "momentum", "scan", 4),
    ],
)
def test_replica_functions_give_the_numbers_of_mirrored_ones(
    make, optimizer, way, count
):
    found = trained_by_hand(make, optimizer, way, sharded(count), True)
    mirrored = sharded(count, "mirrored")
    expected = trained_by_hand(make, optimizer, way, mirrored, False)
    for own, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=1e-4, atol=1e-5)


def test_a_function_gathers_variables_and_no_slots():
    chosen = sharded()
    with chosen.scope():
        model, x = transformer(width=64)
        optimizer = parts.OPTIMIZERS["adam"]()
        optimizer.build(model.trainable_variables)
    step = keras_dist.function(classifier_step(model, optimizer))
    batch = parts.shares(chosen, x, LABELS)
    (program,) = measures.compiled("step", lambda: chosen.run(step, args=batch))
    found = measures.collectives_in(program)
    whole = measures.size_of(filter(shards.is_large, model.trainable_variables))
    gathered = measures.bytes_sent(found, "all-gather")
    assert gathered == pytest.approx(whole, rel=0.05)


def test_two_optimizers_in_a_function():
    """Each update is in parts, and what is between them sees the first."""
    found = []
    for variables in ("sharded", "mirrored"):
        chosen = sharded(4, variables)
        keras.utils.set_random_seed(0)
        with chosen.scope():
            model = keras.Sequential([keras.Input((64,))])
            model.add(layers.Dense(64))
            model.add(layers.Dense(64))
            optimizers = [keras.optimizers.Adam(0.01) for _ in model.layers]
            for optimizer, layer in zip(optimizers, model.layers, strict=True):
                optimizer.build(layer.trainable_variables)

        def losses_of(x, model=model):
            return ops.mean(ops.square(model(x)), axis=-1)

        both = [
            train_step(layer, optimizer, losses_of)
            for layer, optimizer in zip(model.layers, optimizers, strict=True)
        ]

        @keras_dist.function
        def step(x, model=model, both=both):
            seen = [each(x) for each in both]
            return ops.stack([*seen, ops.mean(model.layers[0].kernel * 100)])

        x = np.arange(8 * 64, dtype="float32").reshape(8, 64) / 512
        (values,) = parts.shares(chosen, x)
        rows = [chosen.run(step, args=(values,)) for _ in range(3)]
        losses = [np.stack(chosen.experimental_local_results(r)) for r in rows]
        found.append([*losses, *model.get_weights()])
    for own, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=1e-4, atol=1e-6)


def test_forward_mode_derivatives_pass_the_gather():
    """As for products of a Hessian and a vector in a step of the user's."""

    class Curved(keras.Sequential):
        def train_step(self, data):
            x, y, *_ = data
            slope = jax.jvp(
                lambda x: self.compute_loss(x, y, self(x)), (x,), (x * 0 + 1,)
            )[1]
            return {"slope": slope}

    found = []
    for count in (1, 4):
        keras.utils.set_random_seed(0)
        with sharded(count).scope():
            model = Curved([keras.Input((40,)), layers.Dense(40)])
            model.compile("sgd", "mse")
            model.optimizer.build(model.trainable_variables)
        x = np.linspace(0, 1, 16 * 40, dtype="float32").reshape(16, 40)
        found.append(model.train_on_batch(x, x, return_dict=True)["slope"])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
