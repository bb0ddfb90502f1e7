"""Reads letters in images; a layer adds a loss for each image."""

import keras
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng

LETTERS, STEPS = 4, 6


class CTCLayer(layers.Layer):
    def call(self, y_true, y_pred):
        rows = ops.shape(y_true)[0]
        input_length = ops.shape(y_pred)[1] * ops.ones((rows,), "int32")
        label_length = ops.shape(y_true)[1] * ops.ones((rows,), "int32")
        # A number for each image of the batch.
        self.add_loss(
            ops.ctc_loss(
                ops.cast(y_true, "int32"),
                y_pred,
                label_length,
                input_length,
                mask_index=0,
            )
        )
        return y_pred


def make():
    images = keras.Input((STEPS, 4, 1), name="image")
    labels = keras.Input((2,), name="label")
    x = layers.Conv2D(3, 3, padding="same", activation="relu")(images)
    x = layers.MaxPooling2D((1, 2))(x)
    x = layers.Reshape((STEPS, 6))(x)
    x = layers.Conv1D(4, 3, padding="same", activation="relu")(x)
    x = layers.Dense(LETTERS + 1, name="dense2")(x)
    model = keras.Model([images, labels], CTCLayer(name="ctc_loss")(labels, x))
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    data = {
        "image": rng().uniform(size=(ROWS, STEPS, 4, 1)).astype("float32"),
        "label": rng().integers(1, LETTERS, (ROWS, 2)).astype("float32"),
    }
    return model, {"x": data}
