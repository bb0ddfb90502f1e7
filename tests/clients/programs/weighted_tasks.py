"""Two tasks, whose weights are learned, with metrics of the author's own."""

import keras
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng


class TruePositives(keras.metrics.Metric):
    """Counts rows; as the guide of Keras has it."""

    def __init__(self, name="true_positives", **kwargs):
        super().__init__(name=name, **kwargs)
        self.count = self.add_variable(
            shape=(), name="count", initializer="zeros"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        guesses = ops.argmax(y_pred, axis=1)
        right = ops.cast(
            ops.equal(ops.cast(y_true, "int32"), ops.cast(guesses, "int32")),
            "float32",
        )
        if sample_weight is not None:
            right = right * ops.cast(sample_weight, "float32")
        self.count.assign_add(ops.sum(right))

    def result(self):
        return self.count.value


class Tasks(keras.Model):
    """Weighs two losses by two variables that it learns."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(6, activation="tanh")
        self.score = layers.Dense(1)
        self.kind = layers.Dense(3, activation="softmax")
        self.log_vars = self.add_weight(
            shape=(2,), initializer="zeros", name="log_vars"
        )

    def call(self, x):
        x = self.hidden(x)
        return {"score": self.score(x), "kind": self.kind(x)}

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        score = ops.mean(
            ops.square(ops.squeeze(y_pred["score"], -1) - y["score"])
        )
        kind = ops.mean(
            keras.losses.sparse_categorical_crossentropy(
                y["kind"], y_pred["kind"]
            )
        )
        losses = ops.stack([score, kind])
        return ops.sum(losses * ops.exp(-self.log_vars) + self.log_vars)


def make():
    model = Tasks()
    model.compile(
        optimizer=keras.optimizers.AdamW(0.01, clipnorm=0.5),
        metrics={"kind": [TruePositives()], "score": ["mae"]},
    )
    data = {
        "x": rng().normal(size=(ROWS, 4)).astype("float32"),
        "y": {
            "score": rng().normal(size=ROWS).astype("float32"),
            "kind": rng().integers(0, 3, ROWS),
        },
    }
    return model, data
