"""The contract's numbers: which tests carry them, which have none, and why.

A number is an assertion of the contract with tf.distribute. `LEFT_OUT` has
those that no test carries; `test_coverage.py` holds that there are no others.
"""

import collections
import json
import pathlib

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


class Table:
    """Number x (backend, implementation) x outcomes.

    Args:
        path: A JSON file where the columns of earlier runs, on other
            backends, are found and this run's are left; or `None`.
    """

    def __init__(self, path=None):
        self._path = path and pathlib.Path(path)
        self._new = {}
        self._reasons = {}

    def add(self, column, numbers, outcome, reason=""):
        """Counts one test's outcome for each of its numbers."""
        counts = self._new.setdefault(column, {})
        for number in map(str, numbers):
            counts.setdefault(number, collections.Counter())[outcome] += 1
            if reason:
                self._reasons[number, column] = reason

    def lines(self):
        """The table as text, a line a number, and what has no test."""
        if not self._new:
            return
        columns = self._merged()
        yield f"{'number':8}" + "".join(f"{name:26}" for name in columns)
        absent = []
        for number in map(str, NUMBERS):
            cells = [_cell(counts.get(number)) for counts in columns.values()]
            if any(cells):
                yield (
                    f"{number:8}" + "".join(f"{cell:26}" for cell in cells)
                ).rstrip()
            else:
                absent.append(number)
        for (number, column), reason in self._reasons.items():
            yield f"skipped {number} ({column}): {reason}"
        for reason in dict.fromkeys(LEFT_OUT.values()):
            without = [n for n, why in LEFT_OUT.items() if why == reason]
            yield f"left out {', '.join(map(str, without))}: {reason}"
        left_out = set(map(str, LEFT_OUT))
        others = [number for number in absent if number not in left_out]
        if others:
            yield f"carried by no test of this run: {', '.join(others)}"

    def _merged(self):
        if not self._path:
            return self._new
        earlier = (
            json.loads(self._path.read_text()) if self._path.exists() else {}
        )
        merged = {**earlier, **self._new}
        self._path.write_text(json.dumps(merged, indent=1))
        return merged


def _cell(counts):
    return ", ".join(f"{n} {outcome}" for outcome, n in (counts or {}).items())
