"""Gradients that a `train_step` changes by torch's own means."""

import warnings

import keras
import numpy as np
import pytest
import torch

from gradients.helpers import weights_after_fit


class Backward(keras.Model):
    """Calls `backward`, and changes what it leaves."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        slopes = self.differentiate(loss)
        with torch.no_grad():
            slopes = self.change(slopes) or slopes
        self.optimizer.apply(slopes, self.trainable_variables)
        return {"loss": loss}

    def differentiate(self, loss):
        loss.backward()
        return [v.value.grad for v in self.trainable_variables]

    def change(self, slopes):
        pass


class Grad(Backward):
    """Calls `autograd.grad`."""

    def differentiate(self, loss):
        leaves = [v.value for v in self.trainable_variables]
        return list(torch.autograd.grad(loss, leaves, allow_unused=True))


def clamped(slopes):
    for slope in slopes:
        slope.clamp_(-0.1, 0.1)


def clamped_data(slopes):
    for slope in slopes:
        slope.data.clamp_(-0.1, 0.1)


def not_yet_clipped(slopes):
    """By a norm that the first gradients do not reach."""
    norm = torch.sqrt(sum((slope**2).sum() for slope in slopes))
    torch._foreach_mul_(slopes, float(torch.clamp(1e6 / norm, max=1.0)))


def clipped_anew(slopes):
    norm = torch.sqrt(sum((slope**2).sum() for slope in slopes))
    return [slope * torch.clamp(0.1 / norm, max=1.0) for slope in slopes]


def signs(slopes):
    torch._foreach_sign_(slopes)


CHANGES = [clamped, clamped_data, not_yet_clipped, clipped_anew, signs]


class AssignedBack(Backward):
    def differentiate(self, loss):
        loss.backward()
        for v in self.trainable_variables:
            v.value.grad = v.value.grad.sign()
        return [v.value.grad for v in self.trainable_variables]


class BetweenTwo(Backward):
    """Changes those of one pass before another one is added."""

    def differentiate(self, loss):
        loss.backward(retain_graph=True)
        for v in self.trainable_variables:
            v.value.grad.clamp_(-0.1, 0.1)
        loss.backward()
        return [v.value.grad for v in self.trainable_variables]


class InTheSecondStep(Backward):
    """An optimizer that the first steps do not apply."""

    steps = 0

    def train_step(self, data):
        type(self).steps += 1
        if self.steps > 2:  # one on each replica
            return super().train_step(data)
        return {"loss": self.compute_loss(y=data[1], y_pred=self(data[0]))}

    def change(self, slopes):
        clamped(slopes)


class Twice(Backward):
    """The sum of two passes, which is linear."""

    def differentiate(self, loss):
        (0.25 * loss).backward(retain_graph=True)
        (0.75 * loss).backward()
        return [v.value.grad for v in self.trainable_variables]


class ZerosBetween(Backward):
    def differentiate(self, loss):
        (2.0 * loss).backward(retain_graph=True)
        for v in self.trainable_variables:
            v.value.grad.zero_()
        loss.backward()
        return [v.value.grad for v in self.trainable_variables]


class OfData(Backward):
    """The same numbers by another name."""

    def differentiate(self, loss):
        loss.backward()
        return [v.value.grad.data for v in self.trainable_variables]


class Functional(Backward):
    """By `torch.func`, whose results autograd does not know."""

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables

        def loss_of(kernel, bias):
            return ((x @ kernel + bias - y) ** 2).mean()

        leaves = [v.value for v in variables]
        slopes = torch.func.grad(loss_of, argnums=(0, 1))(*leaves)
        self.optimizer.apply(list(slopes), variables)
        return {"loss": loss_of(*leaves)}


def _warnings_of(make):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        weights_after_fit(make)
    return [w for w in seen if "`train_step` has changed" in str(w.message)]


@pytest.mark.parametrize("base", [Backward, Grad])
@pytest.mark.parametrize("change", CHANGES, ids=lambda fn: fn.__name__)
def test_a_change_is_warned_of_once(base, change):
    class Changed(base):
        def change(self, slopes):
            return change(slopes)

    assert len(_warnings_of(Changed)) == 1


@pytest.mark.parametrize("make", [AssignedBack, BetweenTwo, InTheSecondStep])
def test_ways_to_change(make):
    assert len(_warnings_of(make)) == 1


@pytest.mark.parametrize(
    "make", [Backward, Grad, Twice, ZerosBetween, OfData, Functional]
)
def test_those_that_are_as_they_came_say_nothing(make):
    # A warning would be an error.
    np.testing.assert_allclose(
        weights_after_fit(make),
        weights_after_fit(keras.Model, 1),
        rtol=1e-5,
        atol=1e-6,
    )
