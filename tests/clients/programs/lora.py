"""Fine-tuning with low-rank weights beside frozen ones."""

import keras
from keras import layers

from clients.programs.harness import BATCH_SIZE
from clients.programs.harness import ROWS
from clients.programs.harness import rng

WORDS, LENGTH = 8, 5


def make():
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 6, name="tokens")(words)
    x = layers.Dense(6, activation="relu", name="hidden")(x)
    x = layers.EinsumDense(
        "abc,cd->abd", output_shape=(None, 6), name="einsum"
    )(x)
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(words, layers.Dense(3, name="head")(x))
    model.compile(
        optimizer=keras.optimizers.AdamW(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    data = {
        "x": rng().integers(0, WORDS, (ROWS, LENGTH)),
        "y": rng().integers(0, 3, ROWS),
    }
    return model, data


def train(model, data):
    """Trains all of it, then low-rank weights, then merges and trains on."""
    options = {"batch_size": BATCH_SIZE, "shuffle": False, "verbose": 0}
    logs = {"all": model.fit(**data, **options).history}
    for name in ("tokens", "hidden", "einsum"):
        model.get_layer(name).enable_lora(rank=2)
    model.get_layer("head").trainable = False
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=model.jit_compile,
    )
    logs["lora"] = model.fit(**data, **options, epochs=2).history
    return logs
