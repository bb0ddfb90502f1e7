"""What the tests of cluster resolvers share."""

import pytest

# The contract's numbers that these tests carry.
NUMBERS = [f"R-{i}" for i in range(1, 24)]
SPEC = {
    "ps": ["ps0:2222", "ps1:2222"],
    "worker": ["worker0:2222", "worker1:2222", "worker2:2222"],
}


def contract(*numbers, native=True):
    """Marks a test with the numbers of the contract that it asserts.

    Args:
        numbers: Strings such as `"R-1"`.
        native: Boolean. Whether the original has to pass the test too, on
            TensorFlow.
    """
    unknown = [number for number in numbers if number not in NUMBERS]
    if unknown or not numbers:
        raise ValueError(f"Not in the contract: {unknown or numbers}")
    return pytest.mark.contract(*numbers, native=native)
