"""Four virtual CPU devices, one seed, and nothing left behind by a test."""

import contextlib
import gc
import importlib.util
import os
import pathlib
import sys
import threading
import time

if os.environ.get("PARITY_PLAIN") != "1":
    os.environ.setdefault("KERAS_DIST_VIRTUAL_DEVICES", "4")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

# The parity harness is a package that the other folders use too.
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from xla_flags import xla_flags

os.environ.setdefault("XLA_FLAGS", xla_flags())

# In the processes that tests start, Keras imports less.
sys.path.append(str(pathlib.Path(__file__).parent / "lean"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [sys.path[-1], os.environ.get("PYTHONPATH")])
)

# It hides them, so that it comes before any framework is looked for.
if os.environ.get("TESTS_WITHOUT"):
    import without  # noqa: F401

if importlib.util.find_spec("torch") and importlib.util.find_spec("tensorflow"):
    # The two only live in one process in this order.
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401

import hypothesis
import keras
import own_ports
import pytest
from keras.src.backend.common.stateless_scope import in_stateless_scope

import divided
import keras_dist
import quicker

sys.meta_path.insert(0, own_ports.OwnPorts)

# Every run tries the same examples, however busy the machine is.
hypothesis.settings.register_profile(
    "keras_dist",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("keras_dist")


# Real launchers, which have settings and a job of their own.
collect_ignore = ["launchers"]


def pytest_configure(config):
    # The smoke tests run in the frameworks as they are.
    if config.option.markexpr != "smoke":
        quicker.compile_less()


def pytest_collection_modifyitems(config, items):
    for item in items:
        for mark in item.iter_markers("only_on"):
            if keras.backend.backend() not in mark.args:
                reason = mark.kwargs["reason"]
                item.add_marker(pytest.mark.skip(reason=reason))
    divided.divide(config, items)


def _set_aside():
    """Collecting after a test then looks at what the test made, no more."""
    gc.collect()
    gc.freeze()


def _global_state():
    return {
        "strategy scope": keras_dist.has_strategy(),
        "stateless scope": in_stateless_scope(),
        "dtype policy": keras.config.dtype_policy().name,
        "floatx": keras.config.floatx(),
        "image data format": keras.config.image_data_format(),
        "distribution": keras.distribution.distribution(),
        # pytest keeps the test's phase in a variable of its own.
        **{
            f"environment variable {name}": value
            for name, value in os.environ.items()
            if name != "PYTEST_CURRENT_TEST"
        },
    }


def _left_over_threads(before):
    """Threads that a test started and that don't end by themselves."""

    def alive():
        return [
            t
            for t in threading.enumerate()
            # A dummy is what Python makes of a thread that a runtime started.
            if t not in before and not isinstance(t, threading._DummyThread)
        ]

    if not alive():
        return []
    # With Keras 3.14, PyTorch's graphs are in cycles, and what a graph holds
    # is freed by the collection after that of the graph.
    for _ in range(3):
        gc.collect()
    deadline = time.monotonic() + 30
    for thread in alive():
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
    return [t.name for t in alive()]


@pytest.fixture(autouse=True)
def hygiene():
    """Seeds are reset before a test, and global state is as it was after."""
    _set_aside()
    keras.utils.set_random_seed(0)
    before = _global_state()
    threads = set(threading.enumerate())
    yield
    after = _global_state()
    changed = {
        name: (before.get(name), after.get(name))
        for name in {*before, *after}
        if before.get(name) != after.get(name)
    }
    assert not changed, f"The test left global state changed: {changed}"
    left = _left_over_threads(threads)
    assert not left, f"The test left threads behind: {left}"


@pytest.fixture
def all_are_large(monkeypatch):
    """Shards variables of any size, so that small models will do."""
    if keras.backend.backend() == "jax":
        from keras_dist_jax.sharding import shards

        monkeypatch.setattr(shards, "LEAST_ELEMENTS", 1)


@pytest.fixture(autouse=True, scope="module")
def _fresh_keras_session():
    yield
    keras.utils.clear_session()
