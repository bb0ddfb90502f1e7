"""What the tests of each backend count in the same way."""

import sys

import pytest


def _calls_of(fn):
    """Python calls that a function makes in this thread."""
    calls = 0

    def profile(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return calls


@pytest.fixture
def calls_a_step():
    """A callable: Python calls of one step of `fit` in this thread."""

    def count(model, x, y):
        def fit(steps):
            rows = 4 * steps
            model.fit(x[:rows], y[:rows], batch_size=4, verbose=0)

        fit(len(x) // 4)  # everything is built and traced
        return (_calls_of(lambda: fit(10)) - _calls_of(lambda: fit(5))) / 5

    return count
