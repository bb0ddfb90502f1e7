"""Tiny models and data for the parity tables."""

import keras
import numpy as np
from keras import layers
from keras import ops

import keras_dist

WORDS, LENGTH = 9, 6


def table(rows, features=4, targets=1):
    """Standard normal features; targets that depend on them."""
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, features)).astype("float32")
    y = np.tanh(x @ rng.normal(size=(features, targets)))
    return {"x": x, "y": y.astype("float32")}


def weights_of(rows):
    """Sample weights in [0, 2); a whole first share of them zero."""
    weights = np.random.default_rng(rows + 1).uniform(0, 2, rows)
    weights[:3] = 0
    weights[4::4] = 0
    return weights.astype("float32")


def overflowing_table(rows):
    """One target in the second batch of 7 whose scaled gradient is infinite."""
    data = table(rows)
    data["y"][8] = 1e12
    return data


def weighted_table(rows):
    return table(rows) | {"sample_weight": weights_of(rows)}


def classes(rows, num_classes=3):
    rng = np.random.default_rng(rows)
    data = table(rows)
    return data | {"y": rng.integers(0, num_classes, (rows, 1))}


def one_hot(rows, num_classes=3):
    data = classes(rows, num_classes)
    return data | {"y": np.eye(num_classes, dtype="float32")[data["y"][:, 0]]}


def weighted_classes(rows):
    return classes(rows) | {"sample_weight": weights_of(rows)}


def images(rows):
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 6, 6, 2)).astype("float32")
    return {"x": x, "y": x.mean(axis=(1, 2))[:, :1] * 5}


def words(rows):
    """Sentences padded at the end with zeros, as `mask_zero` expects."""
    rng = np.random.default_rng(rows)
    x = rng.integers(1, WORDS, (rows, LENGTH))
    for row, length in enumerate(rng.integers(1, LENGTH + 1, rows)):
        x[row, length:] = 0
    return {"x": x, "y": rng.normal(size=(rows, 1)).astype("float32")}


def tagged_words(rows):
    """A target for each word; a whole first share is padding."""
    data = words(rows)
    data["x"][:3] = 0
    y = np.random.default_rng(rows).normal(size=(rows, LENGTH, 1))
    return data | {"y": y.astype("float32")}


def weighted_tagged_words(rows):
    data = tagged_words(rows)
    weights = np.random.default_rng(rows).uniform(0, 2, (rows, LENGTH))
    return data | {"sample_weight": weights.astype("float32")}


def many(rows):
    """Two inputs in a dict and three outputs in a dict."""
    rng = np.random.default_rng(rows)
    a = rng.normal(size=(rows, 4)).astype("float32")
    b = rng.normal(size=(rows, 2)).astype("float32")
    y = {
        "value": a[:, :1] * b[:, 1:],
        "kind": rng.integers(0, 3, (rows, 1)),
        "sign": (b[:, :1] > 0).astype("float32"),
    }
    return {"x": {"a": a, "b": b}, "y": y}


def weighted_many(rows):
    names = ("value", "kind", "sign")
    weights = {n: weights_of(rows + i)[:rows] for i, n in enumerate(names)}
    return many(rows) | {"sample_weight": weights}


def sequence(*stack, inputs=(4,), dtype=None):
    """Builds a factory of a Sequential model from factories of layers."""

    def build():
        return keras.Sequential(
            [layers.Input(inputs, dtype=dtype), *(make() for make in stack)]
        )

    return build


def dense(units=1, **options):
    return lambda: layers.Dense(units, **options)


mlp = sequence(dense(5, activation="tanh"), dense())
classifier = sequence(
    dense(5, activation="tanh"), dense(3, activation="softmax")
)
positive = sequence(dense(5, activation="tanh"), dense(1, activation="sigmoid"))


def text(*stack):
    """A factory of a model on padded sentences."""
    return sequence(
        lambda: layers.Embedding(WORDS, 4, mask_zero=True),
        *stack,
        inputs=(LENGTH,),
        dtype="int32",
    )


def image(*stack):
    return sequence(*stack, inputs=(6, 6, 2))


def two_headed():
    a, b = layers.Input((4,), name="a"), layers.Input((2,), name="b")
    hidden = layers.Dense(5, activation="tanh")(
        layers.Concatenate()([a, b]),
    )
    outputs = {
        "value": layers.Dense(1, name="value")(hidden),
        "kind": layers.Dense(3, activation="softmax", name="kind")(hidden),
        "sign": layers.Dense(1, activation="sigmoid", name="sign")(hidden),
    }
    return keras.Model({"a": a, "b": b}, outputs)


def hidden_too():
    """A model whose second output has no loss."""
    x = layers.Input((4,))
    hidden = layers.Dense(5, activation="tanh")(x)
    return keras.Model(x, {"value": layers.Dense(1)(hidden), "hidden": hidden})


def table_and_hidden(rows):
    data = table(rows)
    hidden = np.zeros((rows, 5), "float32")
    return {"x": data["x"], "y": {"value": data["y"], "hidden": hidden}}


def attention():
    x = layers.Input((LENGTH,), dtype="int32")
    h = layers.Embedding(WORDS, 4, mask_zero=True)(x)
    h = layers.Add()([h, layers.MultiHeadAttention(2, 3)(h, h)])
    h = layers.LayerNormalization()(h)
    h = layers.GlobalAveragePooling1D()(h)
    return keras.Model(x, layers.Dense(1)(h))


class NoNumbers(layers.Layer):
    """Has weights without any numbers, first and last."""

    def build(self, shape):
        self.first = self.add_weight((0, shape[-1]), "ones", name="first")
        self.scale = self.add_weight((shape[-1],), "ones", name="scale")
        self.last = self.add_weight((0, shape[-1]), "ones", name="last")

    def call(self, x):
        none = x[:, :0]
        nothing = ops.matmul(none, self.first) + ops.matmul(none, self.last)
        return x * self.scale + nothing


class RowPenalty(layers.Layer):
    """Adds the mean over the rows of their squares as a loss."""

    def call(self, x):
        self.add_loss(0.3 * ops.mean(ops.sum(ops.square(x), axis=-1)))
        return x

    def compute_output_shape(self, input_shape):
        return input_shape


class RowSums(layers.Layer):
    """Adds losses of all kinds, and counts the rows that it has seen."""

    def build(self, input_shape):
        self.rows = self.add_weight(
            name="rows",
            shape=(),
            initializer="zeros",
            dtype="int32",
            trainable=False,
            aggregation="sum",
        )

    def call(self, x):
        self.rows.assign_add(ops.cast(ops.shape(x)[0], "int32"))
        self.add_loss(0.1 * ops.sum(keras_dist.sum_over_rows(ops.square(x))))
        self.add_loss(0.1 * ops.mean(ops.abs(x)))
        self.add_loss(0.1 * ops.sum(ops.square(x), axis=-1))
        return x


class Contrastive(keras.losses.Loss):
    """Couples rows, in a `__call__` of its own."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        assert sample_weight is None
        y_true = ops.reshape(y_true, (-1, 1))
        same = ops.cast(ops.equal(y_true, ops.transpose(y_true)), "float32")
        scores = ops.matmul(y_pred, ops.transpose(y_pred))
        return ops.mean(ops.square(scores - same))


class AlwaysDropout(layers.Layer):
    """Dropout in training and out of it, to be seen by `predict`."""

    def __init__(self, rate=0.5, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate
        self.generator = keras.random.SeedGenerator(5)

    def call(self, x):
        return keras.random.dropout(x, self.rate, seed=self.generator)

    def compute_output_shape(self, input_shape):
        return input_shape


class Subclassed(keras.Model):
    """A subclass without shapes until it sees data."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(5, activation="tanh")
        self.head = layers.Dense(1)

    def call(self, x, training=False):
        return self.head(self.hidden(x))


class OwnLoss(keras.Model):
    """Adds a term to the compiled loss."""

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        loss = super().compute_loss(
            x=x,
            y=y,
            y_pred=y_pred,
            sample_weight=sample_weight,
            training=training,
        )
        return loss + 0.1 * ops.mean(ops.abs(y_pred))


def own_loss():
    x = layers.Input((4,))
    return OwnLoss(x, layers.Dense(1)(layers.Dense(5, "tanh")(x)))


def frozen():
    model = mlp()
    model.layers[0].trainable = False
    return model


def _four_columns(x):
    return x[:, :4]


def nested():
    inner = sequence(dense(5, activation="tanh"), layers.BatchNormalization)()
    x = layers.Input((4,))
    return keras.Model(x, layers.Dense(1)(inner(_four_columns(inner(x)))))


def row_wise(y_true, y_pred):
    """A user's loss of one number a row."""
    return ops.mean(ops.abs(y_true - y_pred) ** 1.5, axis=-1)


def row_coupled(y_true, y_pred):
    """A user's loss of one number a batch, no mean of anything by row."""
    error = ops.sum(ops.square(y_true - y_pred))
    return error / (1.0 + ops.sum(ops.square(y_pred))) + ops.max(y_pred)
