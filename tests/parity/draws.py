"""Models that draw random numbers in their steps."""

import keras
from keras import layers
from keras import ops

from parity import models


def stack(shape, *parts):
    """The parts one after another, then a few outputs."""
    inputs = keras.Input(shape)
    x = inputs
    for part in parts:
        x = part(x)
    outputs = layers.Dense(3)(layers.Flatten()(x))
    return keras.Model(inputs, outputs)


def sentences(rows):
    data = models.table(rows, 35, 3)
    return data | {"x": data["x"].reshape(rows, 5, 7)}


def mlp(seed=None):
    seeds = (seed, seed and seed + 1)
    return stack(
        (7,),
        layers.Dense(16, activation="relu"),
        layers.Dropout(0.1, seed=seeds[0]),
        layers.Dense(15),
        layers.Dropout(0.5, seed=seeds[1]),
    )


def transformer():
    inputs = keras.Input((5, 7))
    x = layers.Dropout(0.1)(layers.Dense(8)(inputs))
    attended = layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x)
    x = layers.LayerNormalization()(x + layers.Dropout(0.1)(attended))
    wide = layers.Dense(16, activation="gelu")(x)
    x = x + layers.Dense(8)(layers.Dropout(0.1, seed=5)(wide))
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


def recurrent():
    return stack(
        (5, 7),
        layers.LSTM(
            6, dropout=0.2, recurrent_dropout=0.2, return_sequences=True
        ),
        layers.GRU(4, dropout=0.3, recurrent_dropout=0.1, unroll=True, seed=9),
    )


def noisy():
    """Each of Keras' layers of noise, and masks that rows share."""
    return stack(
        (5, 7),
        layers.GaussianNoise(0.3),
        layers.Dense(9, activation="selu"),
        layers.GaussianDropout(0.3),
        layers.AlphaDropout(0.2),
        layers.SpatialDropout1D(0.2),
        layers.BatchNormalization(),
        layers.Dropout(0.3, noise_shape=(None, 1, 9)),
        layers.Dropout(0.2, noise_shape=(1, 5, 9)),
    )


def pictures(rows):
    data = models.table(rows, 192, 3)
    return data | {"x": data["x"].reshape(rows, 8, 8, 3)}


def augmented(*parts):
    def build():
        return stack(
            (8, 8, 3),
            *(part() for part in parts),
            layers.Conv2D(4, 3),
            layers.GlobalAveragePooling2D(),
        )

    return build


FIRST_AUGMENTATIONS = (
    layers.RandomFlip,
    lambda: layers.RandomRotation(0.3),
    lambda: layers.RandomBrightness(0.3, value_range=(0, 1)),
    lambda: layers.RandomContrast(0.3),
    lambda: layers.RandomGaussianBlur(value_range=(0, 1)),
)
OTHER_AUGMENTATIONS = (
    lambda: layers.RandomZoom(0.3),
    lambda: layers.RandomTranslation(0.3, 0.3),
    lambda: layers.RandomHue(0.3, value_range=(0, 1)),
    lambda: layers.RandomErasing(value_range=(0, 1)),
    lambda: layers.RandomShear(0.3, 0.3),
)


class Sampling(layers.Layer):
    """A sample for each row, and a divergence as an added loss."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(11)

    def call(self, x):
        mean, log = ops.split(x, 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        self.add_loss(-0.05 * ops.mean(1 + log - mean**2 - ops.exp(log)))
        return mean + ops.exp(0.5 * log) * noise


def variational():
    return stack((7,), layers.Dense(6), Sampling(), layers.Dense(5))


def _parameters(x):
    """Parameters of a distribution, for each value, in (0, 1)."""
    return 0.2 + 0.6 * ops.sigmoid(ops.stop_gradient(x))


# By name: how to draw something that is added to rows of 7 features.
DRAWS = {
    "uniform": lambda d, x, s: d.uniform(ops.shape(x), -1.0, 2.0, seed=s),
    "truncated": lambda d, x, s: d.truncated_normal(
        ops.shape(x), 0.1, 0.5, seed=s
    ),
    "integers": lambda d, x, s: d.randint(ops.shape(x), 0, 9, seed=s),
    "gamma": lambda d, x, s: d.gamma(ops.shape(x), 0.7, seed=s),
    "gamma_of_rows": lambda d, x, s: d.gamma(
        ops.shape(x), _parameters(x), seed=s
    ),
    "beta_of_rows": lambda d, x, s: d.beta(
        ops.shape(x), _parameters(x), 2 * _parameters(x), seed=s
    ),
    "binomial_of_rows": lambda d, x, s: d.binomial(
        ops.shape(x), 5.0, _parameters(x), seed=s
    ),
    "classes": lambda d, x, s: d.categorical(x, 7, seed=s),
    "one_row": lambda d, x, s: d.normal((1, 7), seed=s),
    "number": lambda d, x, s: d.normal((), seed=s),
    # 12 and 6 are multiples of replicas' rows.
    "of_weights": lambda d, x, s: d.normal((12, 7), seed=s)[:1],
    "of_six": lambda d, x, s: d.normal((6, 7), seed=s)[1:2],
    "without_a_seed": lambda d, x, s: d.normal(ops.shape(x)),
    "one_seed": lambda d, x, s: d.normal(ops.shape(x), seed=4),
    "flat": lambda d, x, s: ops.reshape(
        d.normal((ops.shape(x)[0] * 7,), seed=s), ops.shape(x)
    ),
    "columns": lambda d, x, s: ops.transpose(
        d.normal((7, ops.shape(x)[0]), seed=s)
    ),
    "long_columns": lambda d, x, s: ops.transpose(
        d.normal((12, ops.shape(x)[0]), seed=s)
    )[:, :7],
    "three_a_row": lambda d, x, s: ops.sum(
        d.normal((ops.shape(x)[0], 3, 7), seed=s), 1
    ),
    "columns_in_another_order": lambda d, x, s: d.shuffle(x, axis=1, seed=s),
    # A place in memory that is not in the order of its axes.
    "dropped_columns": lambda d, x, s: ops.transpose(
        d.dropout(ops.transpose(x), 0.5)
    ),
    "half": lambda d, x, s: d.normal(ops.shape(x), dtype="float16", seed=s),
    "double": lambda d, x, s: d.uniform(ops.shape(x), dtype="float64", seed=s),
}


class Drawing(layers.Layer):
    """Adds a draw to its inputs."""

    def __init__(self, name, **kwargs):
        super().__init__(**kwargs)
        self.draw = DRAWS[name]
        self.seeds = keras.random.SeedGenerator(12)

    def call(self, x):
        drawn = self.draw(keras.random, x, self.seeds)
        return x + 0.1 * ops.cast(ops.stop_gradient(drawn), x.dtype)


def drawing(name):
    return stack((7,), layers.Dense(7), Drawing(name), layers.Dense(5))


class Keeping(layers.Layer):
    """Keeps things about its rows on itself between a draw and their use."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dropout(0.3, seed=1)
        self.second = layers.Dropout(0.3)

    def call(self, x):
        self.rows = ops.shape(x)[0]
        self.kept = {"x": x}
        dropped = self.first(x, training=True)
        again = self.second(dropped, training=True) + self.kept["x"]
        return ops.reshape(again, (self.rows, 7))


def keeping():
    return stack((7,), layers.Dense(7), Keeping(), layers.Dense(5))


def checkpointed():
    """Dropout that is computed again in the backward pass."""
    with keras.RematScope(mode="full"):
        hidden = layers.Dense(7, activation="tanh")
        dropped = layers.Dropout(0.3)
    return stack((7,), hidden, dropped, layers.Dense(5), layers.Dropout(0.2))


class Residual(layers.Layer):
    """A block of layers, to be computed again as a whole."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.parts = [
            layers.Dense(7, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(7),
        ]

    def build(self, shape):
        for part in self.parts:
            part.build(shape)

    def call(self, x, training=None):
        hidden = self.parts[1](self.parts[0](x), training=training)
        dropped = self.parts[2](ops.square(hidden), training=training)
        return x + self.parts[3](ops.tanh(dropped))


def checkpointed_blocks():
    """Blocks of one class, whose backward passes begin at the last."""
    with keras.RematScope(mode="full"):
        blocks = [Residual(), layers.Dropout(0.2), Residual()]
    return stack((7,), *blocks)


def shared_over_time():
    """Sequences of any length share a mask of their steps."""
    inputs = keras.Input((None, 7))
    x = layers.Dropout(0.3, noise_shape=(1, None, 7), seed=2)(inputs)
    x = layers.SpatialDropout1D(0.2)(layers.Dense(4)(x))
    return keras.Model(inputs, layers.Dense(3)(ops.mean(x, axis=1)))


class NoisyKernel(layers.Layer):
    """Noise of the shape of weights, whose axes are multiples of rows."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, x):
        return ops.matmul(x, keras.random.normal((8, 12), seed=self.seeds))


def noisy_kernel():
    return stack((7,), layers.Dense(8), NoisyKernel(), layers.Dense(5))
