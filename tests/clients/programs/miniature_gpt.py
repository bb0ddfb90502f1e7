"""Writes the next word: two outputs, one of which has no loss."""

import keras
from keras import layers
from keras import ops

from clients.programs.harness import rng

WORDS, LENGTH, SIZE = 7, 5, 4
SHOWS = ("predict",)
# No replica has two rows: with two outputs, Keras takes those for two targets.
FIT = {"batch_size": 11}
ROWS = 20


class TokenAndPosition(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tokens = layers.Embedding(WORDS, SIZE)
        self.positions = layers.Embedding(LENGTH, SIZE)

    def call(self, x):
        positions = self.positions(ops.arange(0, ops.shape(x)[-1], 1))
        return self.tokens(x) + positions


class Block(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, SIZE)
        self.norm_1 = layers.LayerNormalization(epsilon=1e-3)
        self.norm_2 = layers.LayerNormalization(epsilon=1e-3)
        self.dense = keras.Sequential(
            [layers.Dense(SIZE, activation="gelu"), layers.Dense(SIZE)]
        )

    def call(self, x):
        x = self.norm_1(x + self.attention(x, x, use_causal_mask=True))
        return self.norm_2(x + self.dense(x))


def make():
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = Block()(TokenAndPosition()(inputs))
    outputs = layers.Dense(WORDS, name="words")(x)
    model = keras.Model(inputs=inputs, outputs=[outputs, x])
    model.compile(
        "adam",
        loss=[
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            None,
        ],
    )
    words = rng().integers(0, WORDS, (ROWS, LENGTH + 1))
    return model, {"x": words[:, :-1], "y": words[:, 1:]}
