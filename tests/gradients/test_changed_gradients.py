"""Gradients that a `train_step` changes and applies are those of all rows."""

import keras
import numpy as np
import pytest

import keras_dist
from gradients.helpers import BACKEND
from gradients.helpers import weights_after_fit


class Changing(keras.Model):
    """Computes gradients and gives them to its optimizer, changed or not."""

    def train_step(self, data):
        x, y = data

        def loss_fn():
            return self.compute_loss(y=y, y_pred=self(x, training=True))

        loss, slopes = self.differentiate(loss_fn)
        self.optimizer.apply(self.changed(slopes), self.trainable_variables)
        return {"loss": loss}

    def differentiate(self, loss_fn):
        return keras_dist.value_and_grad(loss_fn, self.trainable_variables)

    def changed(self, slopes):
        return slopes


class Native(Changing):
    """In the words of the framework."""

    def differentiate(self, loss_fn):
        if BACKEND == "jax":
            return super().differentiate(loss_fn)
        variables = self.trainable_variables
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = loss_fn()
            return loss, tape.gradient(loss, variables)
        self.zero_grad()
        loss = loss_fn()
        loss.backward()
        return loss, [v.value.grad for v in variables]


@pytest.mark.parametrize("make", [keras.Model, Changing, Native])
def test_those_that_are_as_they_came(make):
    np.testing.assert_allclose(
        weights_after_fit(make),
        weights_after_fit(keras.Model, 1),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.skipif(BACKEND != "torch", reason="It is of torch.")
def test_clipping_by_torch_is_refused():
    import torch

    imported = torch.nn.utils.clip_grad_norm_

    class Clipped(Native):
        def changed(self, slopes):
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            return slopes

    class ClippedByImported(Native):
        def changed(self, slopes):
            imported([v.value for v in self.trainable_variables], 0.1)
            return slopes

    for model in (Clipped, ClippedByImported):
        with pytest.raises(keras_dist.UnsupportedModelError, match="clipnorm"):
            weights_after_fit(model)
    parameter = torch.ones(2).requires_grad_()
    (parameter * 3.0).sum().backward()
    torch.nn.utils.clip_grad_norm_([parameter], 0.1)
    assert float(parameter.grad.norm()) < 0.11
