"""Structured data: a wide part and a deep one, with adapted preprocessing."""

import keras
import numpy as np
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng

NEEDS_TENSORFLOW = True
COLOURS = np.array(["red", "green", "blue", "none"])


def make():
    random = rng()
    colours = random.choice(COLOURS, (ROWS, 1))
    codes = random.integers(20, 26, (ROWS, 1))
    numbers = random.normal(3, 2, (ROWS, 2)).astype("float32")
    string_lookup = layers.StringLookup()
    string_lookup.adapt(COLOURS)
    lookup = layers.IntegerLookup(vocabulary=list(range(20, 25)))
    normalization = layers.Normalization()
    normalization.adapt(numbers)
    discretization = layers.Discretization(num_bins=3)
    discretization.adapt(numbers)

    inputs = {
        "colour": keras.Input((1,), dtype="int32", name="colour"),
        "code": keras.Input((1,), dtype="int32", name="code"),
        "numbers": keras.Input((2,), name="numbers"),
    }
    encoded = layers.CategoryEncoding(7, output_mode="one_hot")(inputs["code"])
    embedded = layers.Flatten()(
        layers.Embedding(string_lookup.vocabulary_size(), 3)(inputs["colour"])
    )
    wide = layers.BatchNormalization()(
        layers.Concatenate()([encoded, embedded])
    )
    deep = layers.Concatenate()([normalization(inputs["numbers"]), embedded])
    for units in (6, 4):
        deep = layers.Dense(units)(deep)
        deep = layers.BatchNormalization()(deep)
        deep = layers.ReLU()(deep)
        deep = layers.Dropout(0.0)(deep)
    outputs = layers.Dense(3, activation="softmax")(
        layers.Concatenate()([wide, deep])
    )
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    # Text is looked up in the pipeline of the data, as JAX wants it.
    x = {
        "colour": ops.convert_to_numpy(string_lookup(colours)),
        "code": ops.convert_to_numpy(lookup(codes)),
        "numbers": numbers,
    }
    x["numbers"][:, 1] += ops.convert_to_numpy(discretization(numbers))[:, 0]
    return model, {"x": x, "y": random.integers(0, 3, ROWS)}
