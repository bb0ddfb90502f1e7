"""`fit`, `evaluate` and `predict` give one device's numbers."""

import pytest

from parity import cases
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import plain
from parity.harness import train


def _parameters():
    for case in cases.CASES:
        if BACKEND not in case.backends:
            continue
        for count in case.replicas:
            smoke = (case.name, count) in cases.SMOKE
            yield pytest.param(
                case,
                count,
                id=f"{case.name}-{count}",
                marks=[pytest.mark.smoke] if smoke else [],
            )


@pytest.mark.parametrize(("case", "num_replicas"), [*_parameters()])
def test_same_numbers(case, num_replicas):
    assert_same(train(case, num_replicas), plain(case), case.rtol)
