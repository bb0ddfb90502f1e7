"""The contract's numbers: which tests carry them, which have none, and why.

A number is an assertion of the contract with tf.distribute. `LEFT_OUT` has
those that no test carries; `test_coverage.py` holds that there are no others.
"""

import pytest

NUMBERS = [
    *range(1, 228),
    *(f"L-{i}" for i in range(1, 5)),
    *(f"R-{i}" for i in range(1, 24)),
    *(f"F-{i}" for i in range(1, 6)),
]


LEFT_OUT = {
    46: "init scopes exist in TensorFlow's graphs only",
    141: "a context of TensorFlow's internals; outside of `run` reads combine",
    143: "variables of Keras have no scatter methods",
    159: "which collective a framework chooses changes no result of ours",
    197: "a debiased moving average is a function of TensorFlow's internals",
    204: "an argument of Keras 2: optimizers of Keras 3 always sum",
    226: "workers' shapes are not compared, at the cost of a collective each",
    "R-19": "a group of instances of GCE: no one here can try a resolver of it",
}


def contract(*numbers, native=True):
    """Marks a test with the numbers of the contract that it asserts.

    Args:
        numbers: Integers, or strings such as `"L-1"`.
        native: Boolean. Whether the original has to pass the test too, on
            TensorFlow. `False` where we adapted or lifted what it does.
    """
    unknown = [number for number in numbers if number not in NUMBERS]
    if unknown or not numbers:
        raise ValueError(f"Not in the contract: {unknown or numbers}")
    return pytest.mark.contract(*numbers, native=native)
