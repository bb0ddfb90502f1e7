"""Half precision where it is cheap, and a float32 head."""

import keras
from keras import layers

from clients.programs.harness import ROWS
from clients.programs.harness import rng

# Rounded to 8 bits, sums of other rows are other sums.
TOLERANCE = 5e-2


def make():
    inputs = keras.Input((6,))
    x = inputs
    for _ in range(2):
        x = layers.Dense(6, activation="tanh", dtype="mixed_bfloat16")(x)
        x = layers.LayerNormalization(dtype="mixed_bfloat16")(x)
    x = layers.Dense(3, name="logits", dtype="mixed_bfloat16")(x)
    outputs = layers.Activation("softmax", dtype="float32")(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        metrics=["accuracy"],
    )
    x = rng().normal(size=(ROWS, 6)).astype("float32")
    return model, {"x": x, "y": rng().integers(0, 3, ROWS)}
