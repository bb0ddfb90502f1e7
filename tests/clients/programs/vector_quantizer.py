"""A vector-quantized autoencoder, whose codes are running means of rows."""

import functools

import keras
from keras import layers
from keras import ops

import keras_dist
from clients.programs.harness import ROWS
from clients.programs.harness import rng

CODES, SIZE, DECAY = 4, 3, 0.9
# Each replica has sums of its own rows.
_ERROR = "quantizer/counts.*assigned different values.*sum_over_rows"
REFUSED = {"tensorflow": _ERROR, "torch": _ERROR}


class VectorQuantizer(layers.Layer):
    def build(self, input_shape):
        self.codes = self.add_weight(
            shape=(CODES, SIZE),
            initializer=keras.initializers.RandomUniform(-1, 1, seed=3),
            trainable=False,
            name="codes",
        )
        self.counts = self.add_weight(
            shape=(CODES,), initializer="ones", trainable=False, name="counts"
        )
        self.sums = self.add_weight(
            shape=(CODES, SIZE),
            initializer="zeros",
            trainable=False,
            name="sums",
        )

    def call(self, x, training=False):
        distances = ops.sum(
            ops.square(x[:, None] - ops.convert_to_tensor(self.codes)), -1
        )
        nearest = ops.one_hot(ops.argmin(distances, axis=1), CODES)
        quantized = ops.matmul(nearest, self.codes)
        if training:
            # Sums over the rows of the batch, not means.
            self.counts.assign(
                DECAY * self.counts + (1 - DECAY) * self.total(nearest)
            )
            each = nearest[:, :, None] * ops.stop_gradient(x)[:, None]
            self.sums.assign(DECAY * self.sums + (1 - DECAY) * self.total(each))
        commitment = ops.mean((ops.stop_gradient(quantized) - x) ** 2)
        self.add_loss(0.25 * commitment)
        return x + ops.stop_gradient(quantized - x)

    def total(self, rows):
        return ops.sum(rows, axis=0)


class Repaired(VectorQuantizer):
    def total(self, rows):
        return keras_dist.sum_over_rows(rows)


def make(quantizer=VectorQuantizer):
    inputs = keras.Input((6,))
    encoded = layers.Dense(SIZE)(inputs)
    quantized = quantizer(name="quantizer")(encoded)
    model = keras.Model(inputs, layers.Dense(6)(quantized))
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    x = rng().normal(size=(ROWS, 6)).astype("float32")
    return model, {"x": x, "y": x}


repaired = functools.partial(make, Repaired)
