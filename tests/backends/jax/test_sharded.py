"""A sharded optimizer state, counted: bytes, collectives, programs."""

import contextlib
import gc
import math
import re

import jax
import keras
import numpy as np
import pytest
from keras import layers

import keras_dist
from keras_dist_jax.sharding.shards import Shards

CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RNG = np.random.default_rng(0)
BATCH_SIZE = 16
LABELS = RNG.integers(0, 3, 64)


def strategy(num_replicas, optimizer_state="sharded"):
    return keras_dist.MirroredStrategy(
        [f"cpu:{index}" for index in range(num_replicas)],
        optimizer_state=optimizer_state,
    )


def mlp():
    return [
        keras.Input((6,)),
        layers.Dense(37, activation="relu"),
        layers.Dense(3),
    ]


def convolutions():
    return [
        keras.Input((8, 8, 3)),
        layers.Conv2D(4, 3, use_bias=False),
        layers.BatchNormalization(),
        layers.Activation("relu"),
        layers.DepthwiseConv2D(3),
        layers.GlobalAveragePooling2D(),
        layers.Dense(3),
    ]


def words():
    return [
        keras.Input((5,), dtype="int32"),
        layers.Embedding(11, 4),
        layers.Dense(6, activation="gelu", kernel_regularizer="l2"),
        layers.LayerNormalization(),
        layers.Flatten(),
        layers.Dense(3),
    ]


DATA = {
    mlp: RNG.normal(size=(64, 6)).astype("float32"),
    convolutions: RNG.normal(size=(64, 8, 8, 3)).astype("float32"),
    words: RNG.integers(0, 11, (64, 5)),
}


def model_of(stack, optimizer="adam", **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(stack())
    model.compile(optimizer, CROSSENTROPY, **options)
    return model


def sharded_model(num_replicas, stack=mlp, **options):
    with strategy(num_replicas).scope():
        return model_of(stack, **options)


def fit(model, stack=mlp, rows=64, **options):
    options = {
        "batch_size": BATCH_SIZE,
        "shuffle": False,
        "verbose": 0,
        **options,
    }
    data = DATA[stack][:rows], LABELS[:rows]
    return model.fit(*data, **options).history


def slots_of(model):
    return [v for v in model.optimizer.variables if v.shape]


def bytes_on_each():
    """Live bytes by device, of each buffer once, but for those of batches.

    From Keras 3.16, a batch is on one device before it is on all of them, and
    lives until it is there, at any time of the next steps.
    """
    gc.collect()
    buffers = {}
    for array in jax.live_arrays():
        if array.shape[:1] == (BATCH_SIZE,):
            continue
        for shard in array.addressable_shards:
            data = shard.data
            key = shard.device, data.unsafe_buffer_pointer()
            buffers[key] = max(buffers.get(key, 0), data.nbytes)
    found = dict.fromkeys(jax.devices(), 0)
    for (device, _), size in buffers.items():
        found[device] += size
    return np.array(list(found.values()))


def train_programs():
    live = jax.devices()[0].client.live_executables()
    return [e for e in live if e.hlo_modules()[0].name == "jit_train_step"]


def collectives_of(model, stack, **options):
    """Kinds and bytes of all collectives in what `fit` compiles."""
    before = train_programs()
    fit(model, stack, **options)
    (program,) = [e for e in train_programs() if e not in before]
    return collectives_in(program)


def collectives_in(program):
    """Kinds and bytes of a program's collectives."""
    found = []
    pattern = r"= (.*) (all-reduce|reduce-scatter|all-gather|all-to-all|\S*"
    pattern += r"permute)(?:-start)?\("
    text = program.hlo_modules()[0].to_string()
    for results, kind in re.findall(pattern, text):
        sizes = re.findall(r"f32\[([\d,]*)\]", results)
        count = sum(
            int(np.prod([int(n) for n in size.split(",") if n]))
            for size in sizes
        )
        found.append((kind, 4 * count))
    return found


def bytes_of(model):
    return sum(v.value.nbytes for v in model.trainable_variables)


def bytes_of_parts(variables, count):
    """Bytes on each device: an axis of each variable is in equal parts."""
    return sum(
        4 * math.prod(Shards(v.shape, _Devices(count)).shard_shape)
        for v in variables
    )


class _Devices:
    """As much of a layout as says how many parts there are."""

    def __init__(self, count):
        self.num_replicas = count
        mesh = jax.sharding.Mesh(jax.devices()[:count], "replica")
        everywhere = jax.sharding.PartitionSpec()
        self.replicated = jax.sharding.NamedSharding(mesh, everywhere)


def assert_sums_and_gathers_once(model, found, others=16, count=4):
    """Each gradient is summed once, and each new variable gathered once.

    `others` are the bytes of what is summed besides. The CPU's compiler has no
    reduce-scatter.
    """
    sums = sum(size for kind, size in found if kind == "all-reduce")
    gathers = sum(size for kind, size in found if kind == "all-gather")
    assert {kind for kind, _ in found} == {"all-reduce", "all-gather"}
    assert bytes_of(model) <= sums <= bytes_of(model) + others
    assert bytes_of(model) <= gathers
    assert gathers <= count * bytes_of_parts(model.trainable_variables, count)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("stack", [mlp, convolutions, words])
def test_no_state_is_sent(stack, count):
    """Whether or not axes divide by the number of replicas."""
    model = sharded_model(count, stack)
    found = collectives_of(model, stack)
    # What batch normalization has to know of the batch, and the loss.
    others = 16 + 64 * (stack is convolutions)
    assert_sums_and_gathers_once(model, found, others, count)


def test_norms_take_few_more_numbers():
    model = sharded_model(
        4, mlp, optimizer=keras.optimizers.Adam(global_clipnorm=0.1)
    )
    found = collectives_of(model, mlp)
    assert_sums_and_gathers_once(model, found, others=64)


def test_a_batch_of_unequal_shares_costs_the_same():
    model = sharded_model(4, mlp)
    found = collectives_of(model, mlp, batch_size=15, rows=60)
    assert_sums_and_gathers_once(model, found)


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_each_device_keeps_its_part_only(num_replicas):
    plain = model_of(mlp)
    fit(plain)
    whole = sum(v.value.nbytes for v in slots_of(plain))
    most = {}

    class Measure(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.seen.append(bytes_on_each())

    for kind in ("mirrored", "sharded"):
        before = bytes_on_each()
        with strategy(num_replicas, kind).scope():
            model = model_of(mlp)
        measure = Measure()
        measure.seen = []
        fit(model, callbacks=[measure], epochs=2)
        after = bytes_on_each()
        most[kind] = np.max([*measure.seen, after], 0) - before
        for variable in slots_of(model):
            assert variable.numpy().shape == tuple(variable.shape)
        assert np.all(bytes_on_each() <= after)
        del model, measure
    saved = most["mirrored"] - most["sharded"]
    expected = whole - bytes_of_parts(slots_of(plain), num_replicas)
    assert np.all(saved[:num_replicas] >= expected)


def test_slots_are_cut_as_they_are_made():
    with strategy(4).scope():
        model = model_of(mlp)
        before = bytes_on_each()
        model.optimizer.build(model.trainable_variables)
    parts = bytes_of_parts(slots_of(model), 4)
    assert np.all(bytes_on_each() - before <= parts)


def test_nothing_is_compiled_after_each_shape_was_seen(compilations):
    model = sharded_model(2)

    def run(epochs):
        fit(model, rows=60, epochs=epochs)
        model.train_on_batch(DATA[mlp][:16], LABELS[:16])

    run(2)
    compilations["programs"] = 0
    run(3)
    assert compilations["programs"] == 0


class WithApply(keras.Sequential):
    """A user's step, written with variables."""

    def train_step(self, data):
        x, y = data

        def loss_fn():
            return self.compute_loss(x, y, self(x, training=True))

        loss, gradients = keras_dist.value_and_grad(
            loss_fn, self.trainable_variables
        )
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class WithValues(keras.Sequential):
    """A user's step of values, which halves gradients."""

    def train_step(self, state, data):
        optimizer = self.optimizer
        apply = optimizer.stateless_apply

        def halved(values, gradients, parameters):
            return apply(values, [g / 2 for g in gradients], parameters)

        vars(optimizer)["stateless_apply"] = halved
        try:
            return super().train_step(state, data)
        finally:
            vars(optimizer)["stateless_apply"] = apply


@pytest.mark.parametrize("cls", [WithApply, WithValues])
def test_a_users_own_step_costs_no_more(cls):
    models = []
    for make in (None, 2):
        keras.utils.set_random_seed(0)
        with contextlib.nullcontext() if make is None else strategy(2).scope():
            models.append(cls(mlp()))
            models[-1].compile("adam", CROSSENTROPY, jit_compile=True)
    plain, model = models
    if cls is WithValues:  # plain Keras has no step of variables on JAX
        fit(plain, mlp)
    found = collectives_of(model, mlp)
    assert_sums_and_gathers_once(model, found, count=2)
    if cls is WithValues:
        for own, theirs in zip(model.weights, plain.weights, strict=True):
            np.testing.assert_allclose(own, theirs, rtol=2e-5, atol=2e-6)


def test_two_optimizers_each_have_their_parts():
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = layers.Dense(5, activation="tanh")
            self.second = layers.Dense(3)
            self.other = keras.optimizers.RMSprop(0.01, momentum=0.9)

        def call(self, x):
            return self.second(self.first(x))

        def train_step(self, data):
            x, y = data
            variables = self.trainable_variables
            loss, gradients = keras_dist.value_and_grad(
                lambda: self.compute_loss(x, y, self(x)), variables
            )
            self.optimizer.apply(gradients[:2], variables[:2])
            self.other.apply(gradients[2:], variables[2:])
            return {"loss": loss}

    outcomes = []
    for count in (1, 4):
        keras.utils.set_random_seed(0)
        with strategy(count).scope():
            model = Two()
            model(DATA[mlp][:2])
            model.compile("adam", CROSSENTROPY)
            model.optimizer.build(model.trainable_variables[:2])
            model.other.build(model.trainable_variables[2:])
        fit(model)
        fit(model, batch_size=15, rows=30)
        outcomes.append(
            [
                np.asarray(v.numpy())
                for v in [
                    *model.weights,
                    *model.optimizer.variables,
                    *model.other.variables,
                ]
            ]
        )
    for own, theirs in zip(*outcomes, strict=True):
        np.testing.assert_allclose(own, theirs, rtol=2e-5, atol=2e-6)


def test_a_step_that_fails_on_a_device_goes_back_to_the_epochs_start():
    class Fails(layers.Layer):
        calls = -1

        def call(self, inputs):
            def look(x):
                Fails.calls += 1
                if Fails.calls == 3:
                    raise ValueError("of the user's own")
                return x

            like = jax.ShapeDtypeStruct(inputs.shape, inputs.dtype)
            seen = jax.lax.stop_gradient(inputs)
            return jax.pure_callback(look, like, seen) + inputs * 0.5

        def compute_output_shape(self, shape):
            return shape

    with strategy(2).scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(5), Fails(), layers.Dense(3)]
        )
        model.compile("adam", CROSSENTROPY)
    Fails.calls = -1000
    fit(model)
    before = [v.numpy() for v in [*model.weights, *model.optimizer.variables]]
    Fails.calls = 0
    with pytest.raises(Exception, match="of the user's own"):
        fit(model)
    after = [v.numpy() for v in [*model.weights, *model.optimizer.variables]]
    for own, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(own, other)
    Fails.calls = -1000
    fit(model)
