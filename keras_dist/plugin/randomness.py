"""Makes all workers draw the same random numbers, those of the chief."""

import contextlib
import json
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_dist.internals import keras_internals
from keras_dist.plugin.backend import Backend
from keras_dist.plugin.workers import Workers


def share_random_state(backend: Backend, workers: Workers) -> None:
    """Gives all workers the chief's global random states, if they differ."""
    state = random_state(backend)
    if len(set(workers.concatenate_numbers([code_of(state)]))) > 1:
        set_random_state(backend, chiefs_text(state, workers))


def random_state(backend: Backend) -> str:
    """Returns the random states of Python, NumPy, Keras and the framework."""
    return json.dumps(
        {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "keras": keras_internals.global_seed(),
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
    keras_internals.set_global_seed(states["keras"])
    backend.set_random_state(states["framework"])


def code_of(state: str) -> int:
    """Returns a hash of a state, below 2**31."""
    return zlib.crc32(state.encode()) >> 1


def chiefs_text(text: str, workers: Workers) -> str:
    """Returns the chief's text on every worker; lengths may differ."""
    own = np.frombuffer(text.encode(), "uint8").astype("int32")
    size = int(workers.chief_value(np.array([own.size], "int32"))[0])
    if not size:
        return ""
    padded = np.zeros(size, "int32")
    padded[: own.size] = own[:size]
    return bytes(workers.chief_value(padded).astype("uint8")).decode()


def everyones_texts(text: str, workers: Workers) -> list[str]:
    """Returns the texts of all workers on every worker; lengths may differ."""
    own = text.encode()
    sizes = workers.concatenate_numbers([len(own)])
    most = max(sizes)
    numbers = workers.concatenate_numbers([*own, *[0] * (most - len(own))])
    return [
        bytes(numbers[index * most : index * most + size]).decode()
        for index, size in enumerate(sizes)
    ]


@contextlib.contextmanager
def kept_random_state(backend: Backend) -> Iterator[None]:
    """Restores the global random states when the context ends."""
    state = random_state(backend)
    try:
        yield
    finally:
        set_random_state(backend, state)
