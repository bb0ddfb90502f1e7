"""Replica functions take over the state of the calling thread."""

import torch

from parity.harness import strategy as mirrored


def test_autocast_reaches_every_replica():
    x = torch.ones((2, 2))
    strategy = mirrored(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = strategy.run(lambda: torch.mm(x, x).dtype)
    outside = strategy.run(lambda: torch.mm(x, x).dtype)
    assert strategy.experimental_local_results(inside) == (torch.bfloat16,)
    assert strategy.experimental_local_results(outside) == (torch.float32,)


def test_gradients_are_off_in_every_replica():
    strategy = mirrored(2)
    with torch.no_grad():
        seen = strategy.run(lambda: [torch.is_grad_enabled()])
    assert seen == [False]
