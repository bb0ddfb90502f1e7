"""Variables in parts, counted: bytes, collectives, programs, numbers."""

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
from backends.jax import test_sharded
from keras_dist_jax.sharding import shards
from parity.harness import assert_same
from parity.harness import state_of

LENGTH, WORDS, WIDTH, CLASSES, ROWS = 6, 50, 32, 5, 44
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, WORDS, (ROWS, LENGTH))
IMAGES = RNG.normal(size=(ROWS, 8, 8, 3)).astype("float32")
SERIES = RNG.normal(size=(ROWS, LENGTH, 8)).astype("float32")
LABELS = RNG.integers(0, CLASSES, ROWS)
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def strategy(num_replicas, variables="sharded"):
    return keras_dist.MirroredStrategy(
        [f"cpu:{index}" for index in range(num_replicas)], variables=variables
    )


class Positions(layers.Layer):
    """Adds a trained vector to each place."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], name="table")

    def call(self, inputs):
        return inputs + self.table


def block(width, heads, remat):
    """A transformer's block, which `jax.checkpoint` computes twice."""
    # The gradient of a key's bias is rounding errors only.
    attention = layers.MultiHeadAttention(heads, width // heads, use_bias=False)
    up = layers.Dense(4 * width, activation="gelu")
    down, norm = layers.Dense(width), layers.LayerNormalization()

    class Block(layers.Layer):
        def build(self, shape):
            attention.build(shape, shape)
            norm.build(shape)
            up.build(shape)
            down.build((*shape[:-1], 4 * width))

        def call(self, x):
            def compute(x):
                x = x + attention(x, x, use_causal_mask=True)
                return x + down(up(norm(x)))

            return jax.checkpoint(compute)(x) if remat else compute(x)

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    made = Block()
    made.layers = [attention, norm, up, down]  # so that Keras tracks them
    return made


def transformer(remat=False, blocks=2, width=WIDTH):
    """Tokens and their places to classes."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, width, embeddings_regularizer="l2")(inputs)
    x = Positions()(x)
    for _ in range(blocks):
        x = block(width, 2, remat)(x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x)), TOKENS


def convnet():
    """Images to classes, with batch normalization."""
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(20, 5, kernel_constraint="max_norm", use_bias=False)(
        inputs
    )
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    x = layers.Flatten()(layers.Conv2D(20, 3)(x))
    return keras.Model(inputs, layers.Dense(CLASSES)(x)), IMAGES


def recurrent():
    """Series to classes."""
    inputs = keras.Input((LENGTH, 8))
    x = layers.GRU(20, return_sequences=True)(inputs)
    x = layers.LSTM(22)(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x)), SERIES


def scaled(optimizer):
    return keras.optimizers.LossScaleOptimizer(
        optimizer, initial_scale=2.0**10, dynamic_growth_steps=3
    )


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.005),
    "adamw": lambda: keras.optimizers.AdamW(
        0.005, global_clipnorm=0.5, weight_decay=0.1
    ),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.3),
    "muon": lambda: keras.optimizers.Muon(0.005),
    "lamb": lambda: keras.optimizers.Lamb(0.005),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "accumulation": lambda: keras.optimizers.Adam(
        0.005, gradient_accumulation_steps=2
    ),
    "scaled": lambda: scaled(keras.optimizers.RMSprop(0.005)),
}
# Adam divides by the roots of squares near zero, and bfloat16 has 8 bits.
LOOSE = 2e-3
RUNS = [
    (transformer, "adam", 4, 1e-4),
    (transformer, "adamw", 2, 1e-4),
    (transformer, "muon", 4, LOOSE),
    (transformer, "accumulation", 3, 1e-4),
    (convnet, "momentum", 4, 1e-4),
    (convnet, "adam", 4, LOOSE),
    (convnet, "lamb", 2, 1e-3),
    (recurrent, "scaled", 4, 1e-4),
    (recurrent, "adafactor", 4, 1e-3),
    (recurrent, "momentum", 3, 1e-4),
]


def made(make, optimizer, num_replicas=None, **kwargs):
    """A compiled model, plain or under a strategy, and its inputs."""
    keras.utils.set_random_seed(0)
    if num_replicas is None:
        model, x = make()
        model.compile(OPTIMIZERS[optimizer](), CROSSENTROPY, **kwargs)
    else:
        with strategy(num_replicas).scope():
            model, x = make()
            model.compile(OPTIMIZERS[optimizer](), CROSSENTROPY, **kwargs)
    return model, x


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


@pytest.mark.parametrize(
    ("make", "optimizer", "num_replicas", "rtol"),
    [pytest.param(*run, id=f"{run[0].__name__}-{run[1]}") for run in RUNS],
)
def test_the_numbers_of_one_device(make, optimizer, num_replicas, rtol):
    """With batches of 20, 20 and 4 rows; large variables only are in parts."""
    expected = outcome(*made(make, optimizer, metrics=["accuracy"]))
    found = made(make, optimizer, num_replicas, metrics=["accuracy"])
    assert any(map(shards.is_sharded, found[0].trainable_variables))
    assert_same(outcome(*found), expected, rtol)


def test_bfloat16():
    losses = []
    for count in (None, 4):
        model, x = made(
            functools.partial(under, "mixed_bfloat16", transformer),
            "adam",
            count,
        )
        history = model.fit(x, LABELS, batch_size=20, epochs=2, verbose=0)
        losses.append(history.history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=5e-3)


def under(policy, make):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        return make()
    finally:
        keras.config.set_dtype_policy(before)


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
]


@pytest.mark.parametrize("shape", [(40, 30), (33, 33)])
@pytest.mark.parametrize("initializer", INITIALIZERS, ids=str)
def test_initial_values_are_those_of_one_device(initializer, shape):
    if initializer == "identity" and shape[0] != shape[1]:
        shape = (34, 34)
    values = []
    for scope in (None, strategy(4).scope()):
        keras.utils.set_random_seed(0)
        its = initializer
        if not isinstance(its, str):
            its = type(its).from_config(its.get_config())
        if scope is None:
            values.append(keras.Variable(its, shape=shape, dtype="float32"))
            continue
        with scope:
            values.append(keras.Variable(its, shape=shape, dtype="float32"))
    assert shards.is_sharded(values[1])
    assert_close(values[1], values[0])


def assert_close(own, theirs):
    """The compiler may round a product and a sum once, in a whole program."""
    np.testing.assert_allclose(
        own.numpy(), theirs.numpy(), rtol=1e-6, atol=1e-7
    )


def test_a_seed_generator_draws_as_on_one_device():
    values = []
    for scope in (None, strategy(2).scope()):
        generator = keras.random.SeedGenerator(5)
        for _ in range(2):
            its = initializers.RandomNormal(seed=generator)
            if scope is None:
                values.append(keras.Variable(its, shape=(40, 30)))
            else:
                with scope:
                    values.append(keras.Variable(its, shape=(40, 30)))
    for own, theirs in zip(values[2:], values[:2], strict=True):
        assert_close(own, theirs)


def stack():
    inputs = keras.Input((64,))
    x = inputs
    for _ in range(12):
        x = layers.Dense(64)(x)
    return keras.Model(inputs, x)


def test_no_device_ever_has_the_whole_model(monkeypatch):
    """From the first variable to the slots; a device has its share and one."""
    count, seen = 4, []
    monkeypatch.setattr(shards.Shards, "put", refuse)
    original = keras.Variable.__init__

    def counted(self, *args, **kwargs):
        original(self, *args, **kwargs)
        seen.append(test_sharded.bytes_on_each()[:count].max())

    gc.collect()
    before = test_sharded.bytes_on_each()[:count].max()
    monkeypatch.setattr(keras.Variable, "__init__", counted)
    with strategy(count).scope():
        model = stack()
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    state = [*model.variables, *model.optimizer.variables]
    total = sum(np.prod(v.shape, dtype=int) * 4 for v in state)
    small = sum(
        np.prod(v.shape, dtype=int) * 4 for v in state if not shards.is_large(v)
    )
    assert len(seen) >= 72  # 12 kernels, 12 biases, two slots of each
    assert max(seen) - before <= (total / count + small) * 1.02


def refuse(self, value):
    raise AssertionError("A whole value was divided.")


@pytest.mark.parametrize("count", [2, 4])
def test_between_steps_a_device_has_its_share(count):
    seen = []
    gc.collect()
    before = test_sharded.bytes_on_each()[:count]
    with strategy(count).scope():
        model = stack()
        model.compile("adam", "mse")

    class Measure(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(test_sharded.bytes_on_each()[:count] - before)

    # Other batches than those of a shape that is not counted.
    x = np.ones((5 * test_sharded.BATCH_SIZE, 64), "float32")
    model.fit(
        x,
        x,
        batch_size=test_sharded.BATCH_SIZE,
        verbose=0,
        callbacks=[Measure()],
    )
    state = [*model.variables, *model.optimizer.variables]
    large = [v for v in state if shards.is_sharded(v)]
    whole = sum(np.prod(v.shape, dtype=int) * 4 for v in large)
    others = sum(
        np.prod(v.shape, dtype=int) * 4
        for v in state
        if not shards.is_sharded(v)
    )
    assert len(large) == 36
    assert np.max(seen) <= (whole / count + others) * 1.02 + 1024


def collectives_of(model, x, rows=16):
    before = test_sharded.train_programs()
    model.fit(x[:rows], LABELS[:rows], batch_size=rows, verbose=0)
    (program,) = [e for e in test_sharded.train_programs() if e not in before]
    return test_sharded.collectives_in(program)


def bytes_sent(found, kind):
    return sum(size for each, size in found if each == kind)


@pytest.mark.parametrize("remat", [False, True])
def test_each_variable_is_gathered_where_it_is_used(remat):
    """Once, or for a block that is computed again, twice; and summed once."""
    make = functools.partial(transformer, remat, width=64)
    model, x = made(make, "adam", 4)
    found = collectives_of(model, x)
    whole = sum(
        v.value.nbytes for v in model.trainable_variables if shards.is_large(v)
    )
    blocks = sum(
        v.value.nbytes
        for v in model.trainable_variables
        if shards.is_large(v) and ("dense" in v.path or "attention" in v.path)
    )
    small = sum(
        v.value.nbytes
        for v in model.trainable_variables
        if not shards.is_large(v)
    )
    assert {kind for kind, _ in found} == {"all-gather", "all-reduce"}
    expected = whole + blocks if remat else whole
    assert bytes_sent(found, "all-gather") == pytest.approx(expected, rel=0.05)
    sums = bytes_sent(found, "all-reduce")
    assert whole + small <= sums <= whole + small + 1024


def test_nothing_is_compiled_after_each_shape_was_seen(compilations):
    model, x = made(convnet, "adam", 4)

    def train():
        model.fit(x, LABELS, batch_size=20, epochs=2, verbose=0)
        model.evaluate(x, LABELS, verbose=0)
        model.predict(x, verbose=0)
        model.train_on_batch(x[:20], LABELS[:20])

    train()
    compilations["programs"] = 0
    train()
    assert compilations["programs"] == 0


def test_reading_takes_no_device(monkeypatch):
    """`numpy`, `get_weights` and files: one variable at a time, on the host."""
    model, _ = made(convnet, "adam", 4)
    monkeypatch.setattr(shards.Shards, "placed", refuse)
    values = model.get_weights()
    for variable, value in zip(model.weights, values, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
        np.testing.assert_array_equal(np.asarray(variable), value)
        np.testing.assert_array_equal(ops.convert_to_numpy(variable), value)


def test_what_was_assigned_is_what_is_read():
    model, x = made(recurrent, "adam", 3)
    model.fit(x, LABELS, verbose=0)
    changed = [value + 1.0 for value in model.get_weights()]
    model.set_weights(changed)
    for variable, value in zip(model.weights, changed, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    kernel = next(filter(shards.is_sharded, model.weights))
    before = kernel.numpy()
    kernel.assign_add(ops.ones(kernel.shape))
    np.testing.assert_array_equal(kernel.numpy(), before + 1.0)
    with pytest.raises(ValueError, match="must match"):
        kernel.assign(np.zeros((2, 2)))
    np.testing.assert_array_equal(kernel.numpy(), before + 1.0)


def toggled(model, x):
    """Trains, freezes a layer and trains, and frees it again."""
    layer = model.layers[1]
    for trainable in (True, False, True):
        layer.trainable = trainable
        model.compile(OPTIMIZERS["momentum"](), CROSSENTROPY)
        model.fit(x, LABELS, batch_size=20, shuffle=False, verbose=0)
    return state_of(model)


@pytest.mark.parametrize("make", [transformer, convnet])
def test_layers_that_are_frozen_for_a_while(make):
    expected = toggled(*made(make, "momentum"))
    assert_same(toggled(*made(make, "momentum", 4)), expected, 1e-4)


def adapted():
    inputs = keras.Input((64,))
    dense = layers.Dense(64, name="adapted")
    x = dense(layers.Dense(64)(inputs))
    dense.enable_lora(20)
    return keras.Model(inputs, layers.Dense(CLASSES)(x)), np.tile(
        SERIES.reshape(ROWS, -1), 2
    )[:, :64]


def test_low_rank_adapters():
    expected = outcome(*made(adapted, "momentum"))
    model, x = made(adapted, "momentum", 4)
    assert shards.is_sharded(model.get_layer("adapted").lora_kernel_a)
    assert_same(outcome(model, x), expected, 1e-4)


def step_by_hand(model, optimizer):
    """A replica function that trains a classifier for a step."""

    def step_on_parts(x, y):
        def loss_fn():
            losses = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            return keras_dist.compute_average_loss(losses)

        loss, gradients = keras_dist.value_and_grad(
            loss_fn, model.trainable_variables
        )
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step_on_parts


def trained_by_hand(make, optimizer, variables, way):
    """The losses, weights and slots after five steps of a loop."""
    chosen = strategy(4, variables)
    keras.utils.set_random_seed(0)
    with chosen.scope():
        model, x = make()
        optimizer = OPTIMIZERS[optimizer]()
        optimizer.build(model.trainable_variables)

    step = step_by_hand(model, optimizer)
    run = step if way == "run" else keras_dist.function(step)
    sizes = [8, 8, 8, 13, 7]  # of which 13 and 7 are shared unequally
    starts = np.cumsum([0, *sizes])
    batches = [
        (x[start : start + size], LABELS[start : start + size])
        for start, size in zip(starts, sizes, strict=False)
    ]
    iterator = iter(chosen.experimental_distribute_dataset(batches))
    losses = []
    if way == "scan":
        found = keras_dist.scan_steps(run, iterator, len(sizes))
        parts = map(np.asarray, chosen.experimental_local_results(found))
        losses.append(sum(parts))
    else:
        for batch in iterator:
            loss = chosen.run(run, args=batch)
            losses.append(chosen.reduce("SUM", loss, axis=None))
    state = [*model.weights, *optimizer.variables]
    parts = [shards.is_sharded(variable) for variable in state]
    assert any(parts) == (variables == "sharded")
    return [np.ravel(losses), *(variable.numpy() for variable in state)]


@pytest.mark.parametrize(
    "make, optimizer, way, tolerance",
    [
        (transformer, "adamw", "run", 1e-4),
        (transformer, "adamw", "function", 1e-4),
        (transformer, "muon", "function", LOOSE),
        (convnet, "momentum", "scan", 1e-4),
        (convnet, "lamb", "function", 1e-3),
        (recurrent, "scaled", "function", 1e-4),
        (recurrent, "accumulation", "scan", 1e-4),
    ],
)
def test_replica_functions_give_the_numbers_of_mirrored_ones(
    make, optimizer, way, tolerance
):
    found, expected = (
        trained_by_hand(make, optimizer, variables, way)
        for variables in ("sharded", "mirrored")
    )
    for own, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=tolerance, atol=1e-5)


def test_a_function_gathers_variables_and_no_slots():
    chosen = strategy(4)
    with chosen.scope():
        model, x = transformer(width=64)
        optimizer = OPTIMIZERS["adam"]()
        optimizer.build(model.trainable_variables)

    step = keras_dist.function(step_by_hand(model, optimizer))
    before = functions_named("step_on_parts")
    batch = chosen.experimental_distribute_values_from_function(
        lambda context: (
            x[context.replica_id_in_sync_group : 16 : 4],
            LABELS[context.replica_id_in_sync_group : 16 : 4],
        )
    )
    chosen.run(step, args=batch)
    (program,) = [
        each for each in functions_named("step_on_parts") if each not in before
    ]
    found = test_sharded.collectives_in(program)
    whole = sum(
        v.value.nbytes for v in model.trainable_variables if shards.is_large(v)
    )
    assert bytes_sent(found, "all-gather") == pytest.approx(whole, rel=0.05)


def functions_named(name):
    live = jax.devices()[0].client.live_executables()
    return [e for e in live if e.hlo_modules()[0].name == f"jit_{name}"]


def test_two_optimizers_in_a_function():
    """Each update is in parts, and what is between them sees the first."""
    found = []
    for variables in ("sharded", "mirrored"):
        chosen = strategy(4, variables)
        keras.utils.set_random_seed(0)
        with chosen.scope():
            made = [layers.Dense(64), layers.Dense(64)]
            for layer in made:
                layer.build((None, 64))
            optimizers = [keras.optimizers.Adam(0.01) for _ in made]
            for optimizer, layer in zip(optimizers, made, strict=True):
                optimizer.build(layer.trainable_variables)

        @keras_dist.function
        def step(x, made=made, optimizers=optimizers):
            first, second = made
            seen = []
            for optimizer, layer in zip(optimizers, made, strict=True):

                def loss_fn():
                    errors = ops.mean(ops.square(second(first(x))), axis=-1)
                    return keras_dist.compute_average_loss(errors)

                loss, gradients = keras_dist.value_and_grad(
                    loss_fn, layer.trainable_variables
                )
                optimizer.apply(gradients, layer.trainable_variables)
                seen.append(loss)
            return ops.stack([*seen, ops.mean(first.kernel * 100)])

        x = np.arange(8 * 64, dtype="float32").reshape(8, 64) / 512
        values = chosen.experimental_distribute_values_from_function(
            lambda context, x=x: x[context.replica_id_in_sync_group :: 4]
        )
        rows = [chosen.run(step, args=(values,)) for _ in range(3)]
        found.append(
            [
                *(np.stack(chosen.experimental_local_results(r)) for r in rows),
                *(v.numpy() for layer in made for v in layer.weights),
            ]
        )
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
        with strategy(count).scope():
            model = Curved([keras.Input((40,)), layers.Dense(40)])
            model.compile("sgd", "mse")
            model.optimizer.build(model.trainable_variables)
        x = np.linspace(0, 1, 16 * 40, dtype="float32").reshape(16, 40)
        found.append(model.train_on_batch(x, x, return_dict=True)["slope"])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
