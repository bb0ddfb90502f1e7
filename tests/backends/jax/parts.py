"""What the tests of variables in parts train, and how they look at it."""

import jax
import keras
import numpy as np
from keras import layers
from keras import ops

import keras_dist
from keras_dist_jax.sharding import shards
from parity import harness
from parity.harness import assert_same
from parity.harness import state_of

LENGTH, WORDS, WIDTH, CLASSES, ROWS = 6, 50, 16, 5, 44
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, WIDTH)).astype("float32")
TOKENS = RNG.integers(0, WORDS, (ROWS, LENGTH))
IMAGES = RNG.normal(size=(ROWS, 8, 8, 3)).astype("float32")
SERIES = RNG.normal(size=(ROWS, LENGTH, 8)).astype("float32")
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


def sharded(num_replicas=4, variables="sharded"):
    return keras_dist.MirroredStrategy(
        harness.devices(num_replicas), variables=variables
    )


def logical(logical_devices, layout_map=None, count=4, **options):
    return keras_dist.MirroredStrategy(
        harness.devices(count),
        logical_devices=logical_devices,
        layout_map=LAYOUTS if layout_map is None else layout_map,
        **options,
    )


class Positions(layers.Layer):
    """Adds a trained vector to each place."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], name="table")

    def call(self, inputs):
        return inputs + self.table


class Block(layers.Layer):
    """A transformer's block, which `jax.checkpoint` may compute twice."""

    def __init__(self, width, remat):
        super().__init__(name="block")
        self.remat = remat
        # The gradient of a key's bias is rounding errors only.
        self.attention = layers.MultiHeadAttention(
            4, width // 4, use_bias=False
        )
        self.norm = layers.LayerNormalization()
        self.up = layers.Dense(4 * width, activation="gelu", name="up")
        self.down = layers.Dense(width, name="down")

    def build(self, shape):
        self.attention.build(shape, shape)
        self.norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], self.up.units))

    def call(self, x):
        def compute(x):
            x = x + self.attention(x, x, use_causal_mask=True)
            return x + self.down(self.up(self.norm(x)))

        return jax.checkpoint(compute)(x) if self.remat else compute(x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def transformer(remat=False, blocks=1, width=32):
    """Tokens and their places to classes."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(
        WORDS, width, embeddings_regularizer="l2", name="words"
    )(inputs)
    x = layers.Dropout(0.1)(Positions()(x))
    for _ in range(blocks):
        x = Block(width, remat)(x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x)), TOKENS


def mlp():
    """Two layers that a replica's devices divide, and others."""
    inputs = keras.Input((WIDTH,))
    x = layers.Dense(64, activation="relu", name="up")(inputs)
    x = layers.Dropout(0.1)(x)
    x = layers.Dense(32, use_bias=False, name="down")(x)
    x = layers.BatchNormalization()(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x)), X


def convnet():
    """Images to classes, with batch normalization."""
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(20, 5, kernel_constraint="max_norm", use_bias=False)(
        inputs
    )
    x = layers.Activation("relu")(layers.BatchNormalization()(x))
    x = layers.Flatten()(layers.Conv2D(20, 3)(x))
    return keras.Model(inputs, layers.Dense(CLASSES)(x)), IMAGES


def recurrent():
    """Series to classes."""
    inputs = keras.Input((LENGTH, 8))
    x = layers.GRU(20, return_sequences=True)(inputs)
    x = layers.LSTM(22)(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x)), SERIES


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
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.RMSprop(0.005),
        initial_scale=2.0**10,
        dynamic_growth_steps=3,
    ),
}


def made(make, optimizer, strategy=None, **kwargs):
    """A compiled model, plain or under a strategy, and its inputs."""
    keras.utils.set_random_seed(0)
    with harness.scope(strategy, lambda strategy: strategy):
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


def assert_numbers_of_one_device(make, optimizer, strategy, rtol=1e-3, **more):
    """With batches of 20 and 19 rows; large variables only are in parts.

    Adam divides by the roots of squares near zero: such rows ask for less.
    """
    expected = outcome(*made(make, optimizer, metrics=["accuracy"]))
    model, x = made(make, optimizer, strategy, metrics=["accuracy"])
    assert any(map(shards.is_sharded, model.trainable_variables))
    assert_same(outcome(model, x), expected, rtol, **more)
    return model


def part_of(variable):
    """The shape of the part on a device."""
    return shards.stored(variable).addressable_shards[0].data.shape


def refuse(self, value):
    raise AssertionError("A whole value was divided or placed.")


def shares(strategy, *arrays, rows=16):
    """As many rows of each array, in equal shares."""
    count = strategy.num_replicas_in_sync
    return strategy.experimental_distribute_values_from_function(
        lambda context: tuple(
            ops.convert_to_tensor(
                array[context.replica_id_in_sync_group : rows : count]
            )
            for array in arrays
        )
    )
