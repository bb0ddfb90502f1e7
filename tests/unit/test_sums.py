"""Sums over rows, means, and what is neither, told apart by halves."""

import numpy as np
import pytest

from keras_dist.replica.sums import Kind
from keras_dist.replica.sums import clearer
from keras_dist.replica.sums import kind_of

ROWS = np.random.default_rng(1).normal(size=(8, 3))


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda x: np.sum(x**2), Kind.SUM),
        (lambda x: np.sum(np.abs(x), axis=0), Kind.SUM),
        (lambda x: len(x), Kind.SUM),
        (lambda x: np.mean(x), Kind.MEAN),
        (lambda x: np.mean(x, axis=0), Kind.MEAN),
        (lambda x: 2.5, Kind.CONSTANT),
        (lambda x: np.var(x), Kind.COUPLED),
        (lambda x: np.max(x), Kind.COUPLED),
        (lambda x: np.sqrt(np.sum(x**2)), Kind.COUPLED),
        (lambda x: np.sum(x**2) + np.mean(x**2), Kind.COUPLED),
        (lambda x: x, Kind.COUPLED),
        (lambda x: 0.0, Kind.UNKNOWN),
        (lambda x: np.nan, Kind.UNKNOWN),
        (lambda x: np.zeros(0), Kind.UNKNOWN),
    ],
)
def test_kinds(fn, kind):
    assert kind_of(fn(ROWS), fn(ROWS[:4]), fn(ROWS[4:])) is kind


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        ((10.0, 4.0, 5.5), Kind.SUM),
        ((5.0, 4.0, 5.5), Kind.MEAN),
        ((1.0, 4.0, 5.5), Kind.UNKNOWN),
        ((1.0, -1.0, 1.0), Kind.UNKNOWN),
    ],
)
def test_random_numbers_are_taken_as_the_nearest(numbers, kind):
    assert kind_of(*numbers, is_noisy=True) is kind


def test_what_cancels_out_says_nothing():
    assert kind_of(0.0, 1.0, -1.0) is Kind.UNKNOWN


@pytest.mark.parametrize(
    ("one", "other", "result"),
    [
        (Kind.UNKNOWN, Kind.SUM, Kind.SUM),
        (Kind.MEAN, Kind.UNKNOWN, Kind.MEAN),
        (Kind.CONSTANT, Kind.SUM, Kind.SUM),
        (Kind.CONSTANT, Kind.UNKNOWN, Kind.CONSTANT),
        (Kind.SUM, Kind.SUM, Kind.SUM),
        (Kind.SUM, Kind.MEAN, Kind.COUPLED),
    ],
)
def test_two_attempts_say_more_than_one(one, other, result):
    assert clearer(one, other) is result
