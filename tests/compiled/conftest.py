"""The programs of each target, compiled once, in a process of their own."""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import keras
import pytest

from runs.runs import TESTS

TARGETS = (
    *("h100:8", "v5e:2x2"),
    pytest.param("h100:4x8", marks=pytest.mark.nightly),
    pytest.param("v5e:4x4", marks=pytest.mark.nightly),
    pytest.param("v5e:16x16", marks=pytest.mark.nightly),
)


def pytest_collection_modifyitems(items):
    has_compilers = importlib.util.find_spec("libtpu") is not None
    if keras.backend.backend() == "jax" and has_compilers:
        return
    reason = "JAX and keras-dist[targets] have the compilers."
    for item in items:
        if item.path.parent == TESTS / "compiled":
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def compiled():
    """Returns a function of a target's name: how many devices, and programs."""

    def of_target(target):
        found = _compiled(target)
        return found["devices"], found["programs"]

    return of_target


@pytest.fixture(scope="session")
def is_own():
    """Returns a function of a target's name: whether Keras' step is as is."""
    return lambda target: _compiled(target)["is_own"]


@functools.cache
def _compiled(target):
    return found_by("compiled.programs", [target])[target]


def found_by(module, targets):
    """Runs a module in a process of its own, and returns its JSON by target."""
    # Without the flags that make the tests' own programs start sooner.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    run = subprocess.run(
        [sys.executable, "-m", module, *targets],
        cwd=TESTS,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = run.stdout.splitlines()[-len(targets) :]
    return dict(zip(targets, map(json.loads, lines), strict=True))
