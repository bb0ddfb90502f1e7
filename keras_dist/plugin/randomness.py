"""Makes all workers draw the same random numbers, those of the chief."""

import contextlib
import json
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_dist.internals import keras_random
from keras_dist.plugin.backend import Backend
from keras_dist.plugin.workers import Workers


def share_random_state(backend: Backend, workers: Workers) -> None:
    """Gives all workers the chief's global random states, if they differ."""
    state = random_state(backend)
    if len(set(workers.concatenate_numbers([code_of(state)]))) > 1:
        set_random_state(backend, workers.chiefs_text(state))


def random_state(backend: Backend) -> str:
    """Returns the random states of Python, NumPy, Keras and the framework."""
    return json.dumps(
        {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "keras": keras_random.global_seed(),
            "framework": backend.random_state(),
        },
        default=lambda array: array.tolist(),
    )


def set_random_state(backend: Backend, state: str) -> None:
    """Restores the states from `random_state`, of any worker."""
    states: dict[str, Any] = json.loads(state)
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(states["numpy"])
    set_state_of_steps(backend, state)


def set_state_of_steps(backend: Backend, state: str) -> None:
    """Restores the states of Keras and the framework only. Data, which may be
    read ahead, draws from Python's and NumPy's."""
    states = json.loads(state)
    keras_random.set_global_seed(states["keras"])
    backend.set_random_state(states["framework"])


def code_of(state: str) -> int:
    """Returns a hash of a state, below 2**32."""
    return zlib.crc32(state.encode())


@contextlib.contextmanager
def kept_random_state(backend: Backend) -> Iterator[None]:
    """Restores the global random states when the context ends."""
    state = random_state(backend)
    try:
        yield
    finally:
        set_random_state(backend, state)
