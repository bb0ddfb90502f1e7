"""A transformer that translates: masks, and embeddings of positions."""

import keras
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng

WORDS, LENGTH, SIZE = 7, 5, 4


class PositionalEmbedding(layers.Layer):
    def __init__(self, length, words, size, **kwargs):
        super().__init__(**kwargs)
        self.token_embeddings = layers.Embedding(words, size)
        self.position_embeddings = layers.Embedding(length, size)

    def call(self, inputs):
        positions = ops.arange(0, ops.shape(inputs)[-1], 1)
        return self.token_embeddings(inputs) + self.position_embeddings(
            positions
        )

    def compute_mask(self, inputs, mask=None):
        return ops.not_equal(inputs, 0)


class TransformerEncoder(layers.Layer):
    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, size)
        self.dense = layers.Dense(size, activation="relu")
        self.norm_1 = layers.LayerNormalization()
        self.norm_2 = layers.LayerNormalization()
        self.supports_masking = True

    def call(self, inputs, mask=None):
        padding = None if mask is None else ops.cast(mask[:, None, :], "int32")
        attended = self.attention(
            query=inputs, value=inputs, key=inputs, attention_mask=padding
        )
        x = self.norm_1(inputs + attended)
        return self.norm_2(x + self.dense(x))


class TransformerDecoder(layers.Layer):
    def __init__(self, size, **kwargs):
        super().__init__(**kwargs)
        self.attention_1 = layers.MultiHeadAttention(2, size)
        self.attention_2 = layers.MultiHeadAttention(2, size)
        self.dense = layers.Dense(size, activation="relu")
        self.norm_1 = layers.LayerNormalization()
        self.norm_2 = layers.LayerNormalization()
        self.supports_masking = True

    def call(self, inputs, mask=None):
        inputs, encoded = inputs
        causal = self.causal_mask(inputs)
        padding = None
        if mask is not None:
            inputs_mask, encoded_mask = mask
            causal = ops.minimum(
                ops.cast(inputs_mask[:, None, :], "int32"), causal
            )
            padding = ops.cast(encoded_mask[:, None, :], "int32")
        first = self.attention_1(
            query=inputs, value=inputs, key=inputs, attention_mask=causal
        )
        x = self.norm_1(inputs + first)
        second = self.attention_2(
            query=x, value=encoded, key=encoded, attention_mask=padding
        )
        return self.norm_2(x + second + self.dense(x))

    def causal_mask(self, inputs):
        rows, length = ops.shape(inputs)[0], ops.shape(inputs)[1]
        i, j = ops.arange(length)[:, None], ops.arange(length)
        mask = ops.reshape(ops.cast(i >= j, "int32"), (1, length, length))
        return ops.tile(mask, (rows, 1, 1))


def make():
    source = keras.Input((None,), dtype="int32", name="source")
    target = keras.Input((None,), dtype="int32", name="target")
    encoded = TransformerEncoder(SIZE)(
        PositionalEmbedding(LENGTH, WORDS, SIZE)(source)
    )
    x = PositionalEmbedding(LENGTH, WORDS, SIZE)(target)
    x = TransformerDecoder(SIZE)([x, encoded])
    x = layers.Dense(WORDS, activation="softmax")(x)
    model = keras.Model({"source": source, "target": target}, x)
    model.compile(
        keras.optimizers.RMSprop(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(ignore_class=0),
        metrics=["accuracy"],
    )
    random = rng()
    sentences = random.integers(1, WORDS, (ROWS, 2, LENGTH + 1))
    for row, lengths in enumerate(random.integers(2, LENGTH + 1, (ROWS, 2))):
        for words, length in zip(sentences[row], lengths, strict=True):
            words[length:] = 0
    x = {"source": sentences[:, 0, :-1], "target": sentences[:, 1, :-1]}
    return model, {"x": x, "y": sentences[:, 1, 1:]}
