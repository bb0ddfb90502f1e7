"""A step of training, in each backend's own words, as guides have it."""

import contextlib

import keras

BACKEND = keras.backend.backend()


def gradients(loss_fn, variables):
    """Calls `loss_fn`, and differentiates the first thing it returns.

    Returns:
        Tuple of what it returned, and the gradients.
    """
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            results = loss_fn()
        return results, tape.gradient(results[0], variables)
    if BACKEND == "torch":
        for variable in variables:
            variable.value.grad = None
        results = loss_fn()
        results[0].backward()
        return results, [variable.value.grad for variable in variables]
    import keras_dist

    (loss, rest), slopes = keras_dist.value_and_grad(
        lambda: _first_and_rest(loss_fn()), variables, has_aux=True
    )
    return (loss, *rest), slopes


def descend(optimizer, loss_fn, variables):
    """Calls `loss_fn` and lets an optimizer make its first result less."""
    results, slopes = gradients(loss_fn, variables)
    with no_gradients():
        optimizer.apply(slopes, variables)
    return results


def no_gradients():
    """Where optimizers apply: of updates, PyTorch keeps no graph."""
    if BACKEND == "torch":
        import torch

        return torch.no_grad()
    return contextlib.nullcontext()


def _first_and_rest(results):
    return results[0], tuple(results[1:])


class Tracked(keras.Model):
    """Makes the first of its `losses` of a batch less, and tracks them all."""

    NAMES = ("loss",)

    def __init__(self):
        super().__init__()
        self.trackers = [keras.metrics.Mean(name=each) for each in self.NAMES]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, data):
        batch = data[0] if isinstance(data, tuple) else data
        results = descend(
            self.optimizer, lambda: self.losses(batch), self.trainable_weights
        )
        for tracker, result in zip(self.trackers, results, strict=True):
            tracker.update_state(result)
        return {m.name: m.result() for m in self.metrics}
