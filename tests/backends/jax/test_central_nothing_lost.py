"""A failure loses nothing where variables are on one device, either."""

import pytest
import test_nothing_lost

from parity import harness

globals().update(
    {
        name: value
        for name, value in vars(test_nothing_lost).items()
        if name.startswith("test_") or name in ("fails", "trained")
    }
)


@pytest.fixture
def strategy_of():
    """Keeps variables on a device apart, on one replica too."""
    return harness.central
