"""A new head on a frozen backbone, which is thawed and tuned later."""

import keras
from keras import layers

from clients.programs.harness import BATCH_SIZE
from clients.programs.harness import ROWS
from clients.programs.harness import rng


def backbone():
    """A small network as those of `keras.applications` are."""
    images = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, strides=2, use_bias=False, padding="same")(images)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.ReLU(6.0)(x)
    x = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.ReLU(6.0)(x)
    return keras.Model(images, x, name="backbone")


def compiled(model, rate):
    model.compile(
        optimizer=keras.optimizers.Adam(rate),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy()],
    )
    return model


def make():
    base = backbone()
    base.trainable = False
    inputs = keras.Input((8, 8, 3))
    x = layers.Rescaling(scale=1 / 127.5, offset=-1)(inputs)
    x = base(x, training=False)
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    data = {
        "x": rng().uniform(0, 255, (ROWS, 8, 8, 3)).astype("float32"),
        "y": rng().integers(0, 2, (ROWS, 1)),
    }
    return compiled(model, 1e-2), data


def train(model, data):
    options = {"batch_size": BATCH_SIZE, "shuffle": False, "verbose": 0}
    logs = {"head": model.fit(**data, **options).history}
    model.get_layer("backbone").trainable = True
    jit = model.jit_compile
    compiled(model, 1e-2).jit_compile = jit
    model.optimizer.epsilon = 1e-2
    logs["all"] = model.fit(**data, **options, epochs=2).history
    return logs
