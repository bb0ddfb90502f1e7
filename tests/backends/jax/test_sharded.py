"""`optimizer_state="sharded"` keeps parts of slots, and sends no more.

Counted are bytes, collectives and programs.
"""

import math

import jax
import keras
import numpy as np
import pytest
from keras import layers

import keras_dist
from backends.jax import measures
from backends.jax.measures import BATCH_SIZE
from backends.jax.measures import bytes_on_each
from keras_dist_jax.sharding.shards import Shards
from parity import harness

CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 3, 64)


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
    with harness.sharded(num_replicas).scope():
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


def collectives_of(model, stack, **options):
    """Kinds and bytes of all collectives in what `fit` compiles."""
    (program,) = measures.compiled(
        "train_step", lambda: fit(model, stack, **options)
    )
    return measures.collectives_in(program)


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
    variables = model.trainable_variables
    total = measures.size_of(variables)
    sums, gathers = (
        measures.bytes_sent(found, kind)
        for kind in ("all-reduce", "all-gather")
    )
    assert {kind for kind, _ in found} == {"all-reduce", "all-gather"}
    assert total <= sums <= total + others
    assert total <= gathers <= count * bytes_of_parts(variables, count)


@pytest.mark.parametrize(
    ("stack", "count", "others", "options"),
    [
        (mlp, 2, 16, {}),
        (mlp, 3, 16, {}),
        (words, 4, 16, {}),
        # What batch normalization has to know of the batch.
        (convolutions, 3, 80, {}),
        # A norm, or an unequal share.
        (mlp, 4, 64, {"optimizer": keras.optimizers.Adam(global_clipnorm=0.1)}),
        (mlp, 4, 16, {"batch_size": 15, "rows": 60}),
    ],
)
def test_no_state_is_sent(stack, count, others, options):
    """Whether or not axes divide by the number of replicas."""
    optimizer = options.pop("optimizer", "adam")
    model = sharded_model(count, stack, optimizer=optimizer)
    found = collectives_of(model, stack, **options)
    assert_sums_and_gathers_once(model, found, others, count)


KINDS = {"mirrored": harness.strategy, "sharded": harness.sharded}


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_each_device_keeps_its_part_only(num_replicas):
    plain = model_of(mlp)
    fit(plain)
    whole = sum(v.value.nbytes for v in slots_of(plain))
    most = {}

    class Measure(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.seen.append(bytes_on_each())

    for kind, make in KINDS.items():
        before = bytes_on_each()
        with make(num_replicas).scope():
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
    with harness.sharded(4).scope():
        model = model_of(mlp)
        before = bytes_on_each()
        model.optimizer.build(model.trainable_variables)
    parts = bytes_of_parts(slots_of(model), 4)
    assert np.all(bytes_on_each() - before <= parts)


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
        with harness.scope(make, harness.sharded):
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
