"""What the tests of each backend count in the same way."""

import concurrent.futures
import gc
import sys

import pytest


class _AtOnce(concurrent.futures.Executor):
    """Does in this thread, at once, what a pool does when it happens to."""

    def submit(self, fn, *args):
        future = concurrent.futures.Future()
        future.set_result(fn(*args))
        return future


def _calls_of(fn):
    """Names of the Python functions that a function calls in this thread."""
    calls = []

    def profile(frame, event, arg):
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    # JAX is called when garbage is collected.
    gc.collect()
    gc.disable()
    sys.setprofile(profile)
    try:
        fn()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.fixture
def calls_of():
    """A callable: the Python functions that a function calls."""
    return _calls_of


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
        ten, five = (len(_calls_of(lambda n=n: fit(n))) for n in (10, 5))
        return (ten - five) / 5

    return count
