"""What the tests of each backend count in the same way."""

import concurrent.futures
import sys

import pytest


class _AtOnce(concurrent.futures.Executor):
    """Does in this thread, at once, what a pool does when it happens to."""

    def submit(self, fn, *args):
        future = concurrent.futures.Future()
        future.set_result(fn(*args))
        return future


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
def calls_a_step(monkeypatch):
    """A callable: Python calls of one step of `fit` in this thread.

    Keras on JAX has a pool of threads for callbacks: how often it starts
    one, and looks at what is not done, differs from run to run.
    """
    monkeypatch.setattr(concurrent.futures, "ThreadPoolExecutor", _AtOnce)

    def count(model, x, y):
        def fit(steps):
            rows = 4 * steps
            model.fit(x[:rows], y[:rows], batch_size=4, verbose=0)

        fit(len(x) // 4)  # everything is built and traced
        return (_calls_of(lambda: fit(10)) - _calls_of(lambda: fit(5))) / 5

    return count
