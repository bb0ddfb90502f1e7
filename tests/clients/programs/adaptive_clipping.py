"""Gradients are clipped by the size of their weights before they apply."""

import keras
from keras import layers
from keras import ops

from clients.programs.harness import ROWS
from clients.programs.harness import rng
from clients.programs.steps import gradients
from clients.programs.steps import no_gradients


def unitwise_norm(x):
    axis = tuple(range(len(x.shape) - 1)) if len(x.shape) > 1 else (0,)
    return ops.sqrt(ops.sum(ops.square(x), axis=axis, keepdims=True))


def adaptively_clipped(weights, slopes, factor=0.01, eps=1e-3):
    clipped = []
    for weight, slope in zip(weights, slopes, strict=True):
        limit = ops.maximum(unitwise_norm(weight), eps) * factor
        norm = unitwise_norm(slope)
        scaled = slope * (limit / ops.maximum(norm, 1e-6))
        clipped.append(ops.where(norm < limit, slope, scaled))
    return clipped


class ClippedModel(keras.Model):
    def train_step(self, data):
        x, y = data

        def loss_fn():
            y_pred = self(x, training=True)
            return self.compute_loss(x=x, y=y, y_pred=y_pred), y_pred

        weights = self.trainable_weights
        (loss, y_pred), slopes = gradients(loss_fn, weights)
        with no_gradients():
            self.optimizer.apply(adaptively_clipped(weights, slopes), weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=ops.shape(x)[0])
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


train_step_of = ClippedModel
# A replica has gradients of its own rows.
TOLD = {"tensorflow": "`train_step`", "torch": "`train_step`"}


class Clipping(keras.optimizers.SGD):
    """Clips where the gradients of all rows are."""

    def apply(self, grads, trainable_variables=None):
        grads = adaptively_clipped(trainable_variables, grads)
        super().apply(grads, trainable_variables)


def repaired():
    return make(keras.Model, Clipping)


def make(cls=ClippedModel, optimizer=keras.optimizers.SGD):
    inputs = keras.Input((5,))
    x = layers.Dense(6, activation="tanh")(inputs)
    model = cls(inputs, layers.Dense(1, activation="sigmoid")(x))
    model.compile(
        optimizer=optimizer(0.5, name="sgd"),
        loss="binary_crossentropy",
        metrics=["accuracy"],
    )
    x = rng().normal(size=(ROWS, 5)).astype("float32")
    return model, {"x": x, "y": rng().integers(0, 2, (ROWS, 1))}
