"""Random states of all of PyTorch's devices are kept and restored."""

import pytest
import torch

from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.randomness import code_of
from keras_dist.plugin.randomness import kept_random_state


class Gpus:
    """Stands for GPUs with a generator each, as `torch.cuda` shows them."""

    def __init__(self, monkeypatch, count):
        self.generators = [torch.Generator() for _ in range(count)]
        for name in ("device_count", "get_rng_state", "set_rng_state"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def device_count(self):
        return len(self.generators)

    def get_rng_state(self, device):
        return self.generators[device].get_state()

    def set_rng_state(self, state, device):
        self.generators[device].set_state(state)

    def draw(self):
        """A number of the CPU, and one of each GPU."""
        return [
            float(torch.rand((), generator=each))
            for each in [None, *self.generators]
        ]


@pytest.fixture
def gpus(monkeypatch):
    return Gpus(monkeypatch, 2)


def test_states_of_all_devices_are_restored(gpus):
    backend = get_backend()
    gpus.draw()
    state = backend.random_state()
    expected = gpus.draw()
    assert gpus.draw() != expected
    backend.set_random_state(state)
    assert gpus.draw() == expected


def test_draws_inside_leave_no_trace(gpus):
    with kept_random_state(get_backend()):
        expected = gpus.draw()
    assert gpus.draw() == expected


def test_a_draw_of_any_device_is_another_state(gpus):
    backend = get_backend()
    codes = [code_of(backend.random_state())]
    for generator in [None, *gpus.generators]:
        torch.rand((), generator=generator)
        codes.append(code_of(backend.random_state()))
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("others", [0, 1, 3])
def test_a_state_of_other_gpus_restores_those_that_are_there(
    gpus, monkeypatch, others
):
    """That of another worker, or in notes on a run without any."""
    backend = get_backend()
    with monkeypatch.context() as patch:
        found = Gpus(patch, others)
        found.draw()
        state = backend.random_state()
        expected = found.draw()
    own = gpus.draw
    backend.set_random_state(state)
    common = 1 + min(others, 2)
    assert own()[:common] == expected[:common]
