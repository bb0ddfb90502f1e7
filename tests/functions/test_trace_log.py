"""It is said why functions are traced, if one asks for it."""

import numpy as np
import pytest

import keras_dist
from functions.helpers import TRACES
from functions.helpers import cut
from functions.helpers import strategy_of


def lines(capfd):
    return [
        line
        for line in capfd.readouterr().err.splitlines()
        if line.startswith("keras_dist: 'step'")
    ]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_it_says_why_when_it_is_asked_to(capfd, monkeypatch, num_replicas):
    monkeypatch.setenv("KERAS_DIST_EXPLAIN_TRACES", "1")
    strategy = strategy_of(num_replicas)

    @keras_dist.function
    def step(x, scale):
        return x * scale

    def run(rows, scale=2.0):
        x = np.zeros((rows, 3), "float32")
        strategy.run(step, (cut(x, num_replicas), scale))
        return lines(capfd)

    first = run(4)
    if not TRACES:
        assert first == []
        return
    assert "float32[" in first[0]
    assert run(4) == []
    (shapes,) = run(6)
    assert "float32[" in shapes
    assert run(6) == [] == run(4)
    assert run(4, 3.0) != []


def test_it_is_silent_otherwise(capfd, monkeypatch):
    monkeypatch.delenv("KERAS_DIST_EXPLAIN_TRACES", raising=False)

    @keras_dist.function
    def step(x):
        return x

    step(np.zeros(3, "float32"))
    assert lines(capfd) == []
