"""These tests look at JAX itself."""

import collections
import gc
import pathlib
import sys

import keras
import numpy as np
import pytest

from backends.classifier import classifier
from backends.classifier import rows
from parity import harness

# What tests run in other processes is a module for them, too.
sys.path.append(str(pathlib.Path(__file__).parent))

ON_JAX = keras.backend.backend() == "jax"
collect_ignore_glob = [] if ON_JAX else ["*.py"]

X, Y = rows(64)


@pytest.fixture
def data():
    """64 rows of 6 features, and a class of 3 for each."""
    return X.copy(), Y.copy()


@pytest.fixture
def strategy_of():
    """Makes the strategy of `make_model`'s models from a number."""
    return harness.strategy


@pytest.fixture
def make_model(strategy_of):
    """Makes a compiled classifier; on no strategy without `num_replicas`."""

    def make(layers=(8,), **kwargs):
        keras.utils.set_random_seed(0)
        stack = [keras.layers.Dense(n, activation="relu") for n in layers]
        return classifier(*stack, **{"metrics": None, **kwargs})

    def make_under(num_replicas=None, strategy=None, **kwargs):
        with harness.scope(num_replicas, strategy or strategy_of):
            return make(**kwargs)

    return make_under


@pytest.fixture
def compilations():
    """Counts programs compiled: a `Counter` with one entry, `programs`."""
    import jax

    counter = collections.Counter(programs=0)

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            counter["programs"] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counter
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def live_bytes():
    """A callable: bytes of all arrays on all devices, above the start's."""
    import jax

    def count():
        gc.collect()
        return sum(
            int(np.prod(array.sharding.shard_shape(array.shape)))
            * array.dtype.itemsize
            * len(array.sharding.device_set)
            for array in jax.live_arrays()
        )

    start = count()
    return lambda: count() - start
