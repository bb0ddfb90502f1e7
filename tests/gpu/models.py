"""Small models of three kinds, and the data that they are trained on.

They are smooth: at the kink of a ReLU, a difference of rounding grows.
"""

import keras
import numpy as np
from keras import layers
from keras import ops

WORDS, LENGTH = 50, 12
CLASSES = 5


def mlp(width=32):
    """Returns a multilayer perceptron with BatchNormalization."""
    return keras.Sequential(
        [
            keras.Input((16,)),
            layers.Dense(width, "tanh"),
            layers.BatchNormalization(),
            layers.Dense(CLASSES),
        ]
    )


def _block(x, filters, strides):
    shortcut = layers.Conv2D(filters, 1, strides, use_bias=False)(x)
    for step in (strides, 1):
        x = layers.Conv2D(filters, 3, step, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        x = layers.Activation("silu")(x)
    return layers.add([x, shortcut])


def resnet():
    """Returns a residual network for images of 16 by 16 pixels.

    On CPUs, oneDNN (issue 6035) writes beyond its memory in convolutions of
    fewer than 16 channels with a kernel of 1 by 1 and strides of 2.
    """
    images = keras.Input((16, 16, 3))
    x = layers.Conv2D(16, 3, padding="same")(images)
    for filters, strides in ((16, 1), (32, 2), (32, 2)):
        x = _block(x, filters, strides)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(CLASSES)(x))


class Positions(layers.Layer):
    """Adds a trained embedding of each position."""

    def build(self, shape):
        self.table = self.add_weight(
            shape=shape[1:], initializer="random_normal", name="table"
        )

    def call(self, x):
        return x + self.table


def gpt():
    """Returns a decoder of words, with causal attention."""
    words = keras.Input((LENGTH,), dtype="int32")
    x = Positions()(layers.Embedding(WORDS, 32)(words))
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(2, 16)(y, y, use_causal_mask=True)
        x = layers.add([x, y])
        y = layers.LayerNormalization()(x)
        y = layers.Dense(32)(layers.Dense(64, "gelu")(y))
        x = layers.add([x, y])
    return keras.Model(words, layers.Dense(WORDS)(x))


def _images(rng, rows):
    x = rng.normal(size=(rows, 16, 16, 3)).astype("float32")
    return x, rng.integers(0, CLASSES, rows)


def _texts(rng, rows):
    text = rng.integers(0, WORDS, (rows, LENGTH + 1)).astype("int32")
    return text[:, :-1], text[:, 1:]


def _table(rng, rows):
    x = rng.normal(size=(rows, 16)).astype("float32")
    return x, np.argmax(x[:, :CLASSES], axis=1)


# Of each model: the function that makes it, and that makes its data.
KINDS = {
    "mlp": (mlp, _table),
    "resnet": (resnet, _images),
    "gpt": (gpt, _texts),
}


def data(kind, rows):
    """Returns `x` and `y`, the same ones each time."""
    return KINDS[kind][1](np.random.default_rng(1), rows)


def compiled(kind, policy="float32", **settings):
    """Returns a compiled model with the same weights each time."""
    keras.utils.set_random_seed(5)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = KINDS[kind][0]()
    finally:
        keras.config.set_dtype_policy(before)
    optimizer = settings.pop("optimizer", None)
    if optimizer is None:
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **settings,
    )
    return model


def to_numpy(value):
    """Returns a variable, tensor or number as a float64 array."""
    if isinstance(value, keras.Variable):
        value = value.value
    return np.asarray(ops.convert_to_numpy(value)).astype("float64")
