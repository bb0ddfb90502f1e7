"""Workers send nothing in vain where all expect a sum."""

import pytest
import torch

from keras_dist.plugin.recorder import Call
from keras_dist_torch.sums import ExpectedSums
from keras_dist_torch.sums import Sum

STEP, END = Call("a step", "a step"), Call("an end", "an end")
GRADIENTS = Sum(STEP, "by size", ((4, torch.float32),), (3, torch.float32))


class Worker:
    """One whose sums are written down, and taken for those of all."""

    def __init__(self):
        self.sent, self.compared = [], 0
        self.sums = ExpectedSums(self._start, torch.device("cpu"))

    def _start(self, flat):
        self.sent.append(flat.tolist())
        return lambda: None

    def _compare(self):
        self.compared += 1

    def step(self):
        self.sums.agree(GRADIENTS, self._compare)
        self.sums.follow(STEP.key)

    def end(self):
        self.sums.give_up()
        self.sums.follow(END.key)

    def epoch(self, steps):
        """Returns how often workers compared, and what they sent in vain."""
        self.sent, self.compared = [], 0
        for _ in range(steps):
            self.step()
        self.end()
        return self.compared, len(self.sent)


def test_epochs_of_one_length_send_nothing_in_vain():
    worker = Worker()
    assert worker.epoch(5) == (1, 2)
    # The first epoch had no call before it.
    assert worker.epoch(5)[1] == 0
    assert [worker.epoch(5) for _ in range(3)] == [(0, 0)] * 3


def test_an_epoch_that_ends_early_sends_zeros_and_a_flag():
    worker = Worker()
    for _ in range(3):
        worker.epoch(5)
    assert worker.epoch(3) == (0, 2)
    assert worker.sent == [[0.0] * 4, [0.0, 0.0, 1.0]]
    assert worker.epoch(3) == (0, 0)
    assert worker.epoch(5)[1] == 0


def test_a_longer_epoch_is_compared_once():
    worker = Worker()
    for _ in range(3):
        worker.epoch(3)
    assert worker.epoch(5)[0] == 1
    assert worker.epoch(5) == (0, 0)


@pytest.mark.parametrize("num_sent", [0, 1])
def test_early_parts_that_were_sent_are_not_sent_again(num_sent):
    worker = Worker()
    worker.step()
    for _ in range(num_sent):
        worker.sums.send_early(torch.ones(4))
    worker.end()
    assert len(worker.sent) == 2
    assert worker.sent[:num_sent] == [[1.0] * 4] * num_sent


def test_nothing_is_expected_after_an_error():
    worker = Worker()
    worker.epoch(5)
    worker.sums.forget()
    assert worker.sums.expected is None
    assert worker.epoch(5)[0] == 1
