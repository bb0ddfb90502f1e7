"""A pytest plugin that runs each test inside of a strategy's scope.

It is loaded in a process of its own, so that our settings for warnings don't
reach Keras' tests. Each test's outcome is written as it is known: a process
that dies tells how far it came.
"""

import contextlib
import json
import os
import pathlib
import signal
import sys
import types

import keras
import pytest

from clients.strategies import make_strategy

# Longer than any of Keras' tests takes; what hangs is a failure.
SECONDS = 300
# Exit statuses: pytest's own of a run that came to its end, and ours.
ENDED = (
    pytest.ExitCode.OK,
    pytest.ExitCode.TESTS_FAILED,
    pytest.ExitCode.NO_TESTS_COLLECTED,
)
LEFT_OPEN = 64


class Outcomes:
    """Writes a line of JSON when a test begins, and one when it has ended.

    Args:
        path: `pathlib.Path` of the file.
    """

    def __init__(self, path):
        self._path = path

    def _write(self, test, outcome, error=""):
        line = {"test": test, "outcome": outcome, "error": error}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_sessionfinish(self, exitstatus):
        if exitstatus in ENDED:
            self._write("", "ended")

    def pytest_collectreport(self, report):
        if report.failed:
            self._write(report.nodeid, "not collected", _error(report))

    def pytest_runtest_logstart(self, nodeid):
        self._write(nodeid, "failed", "The process ended in this test.")

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._write(report.nodeid, "failed", _error(report))
        elif report.skipped:
            self._write(report.nodeid, "skipped")
        elif report.when == "call":
            self._write(report.nodeid, "passed")


def _error(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return str(report.longrepr).strip().splitlines()[-1]
    where = f"{pathlib.Path(crash.path).name}:{crash.lineno}"
    return f"{where}: {' '.join(crash.message.split())}"


class InScope:
    """Runs `setUp`, the test and `tearDown` in the scope of a strategy.

    Args:
        strategy: A `Strategy`, or `None` for plain Keras.
    """

    def __init__(self, strategy):
        self._strategy = strategy

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1337)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_time_limit())
            if self._strategy is not None:
                stack.enter_context(self._strategy.scope())
            return (yield)

    def pytest_runtest_teardown(self, item):
        if self._strategy is not None:
            import keras_dist

            if keras_dist.has_strategy():
                # What follows has to run in another process.
                pytest.exit("A test left a scope open.", returncode=LEFT_OPEN)


@contextlib.contextmanager
def _time_limit():
    def end(*args):
        raise TimeoutError(f"The test took longer than {SECONDS} s.")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def pytest_collection_modifyitems(items):
    """Leaves out the tests that an earlier process has run."""
    known = pathlib.Path(os.environ["CLIENTS_KNOWN"]).read_text().splitlines()
    items[:] = [item for item in items if item.nodeid not in set(known)]


def _skip_if_backend(given_backend, reason):
    return pytest.mark.skipif(
        keras.backend.backend() == given_backend, reason=reason
    )


def pytest_configure(config):
    """Reads from the environment what `clients.processes` has written."""
    # Keras' wheel has its tests without what they import of its repository.
    sys.modules["conftest"] = types.ModuleType("conftest")
    sys.modules["conftest"].skip_if_backend = _skip_if_backend
    strategy = make_strategy(os.environ["CLIENTS_STRATEGY"])
    config.pluginmanager.register(InScope(strategy))
    path = pathlib.Path(os.environ["CLIENTS_OUTCOMES"])
    config.pluginmanager.register(Outcomes(path))
