"""Equal randomness: every worker draws what the chief draws."""

import contextlib
import json
import random
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING
from typing import Any

import numpy as np

from keras_dist.internals import keras_internals

if TYPE_CHECKING:
    from keras_dist.plugin.backend import Backend
    from keras_dist.plugin.workers import Workers


def share_random_state(backend: "Backend", workers: "Workers") -> None:
    """Makes the global random states those of the chief, if they differ.

    States that are equal already stay as they are: a script that sets its
    seeds draws the numbers that it draws on one device.

    Args:
        backend: `Backend`, which knows the framework's own state.
        workers: `Workers`.
    """
    state = random_state(backend)
    if len(set(workers.concatenate_numbers([code_of(state)]))) > 1:
        set_random_state(backend, chiefs_text(state, workers))


def random_state(backend: "Backend") -> str:
    """The states of Python's, NumPy's, Keras' and the framework's randomness.

    Returns:
        String in JSON.
    """
    return json.dumps(
        {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "keras": keras_internals.global_seed(),
            "framework": backend.random_state(),
        },
        default=lambda array: array.tolist(),
    )


def set_random_state(backend: "Backend", state: str) -> None:
    """Goes back to what `random_state` returned, here or elsewhere.

    Args:
        backend: `Backend`.
        state: String.
    """
    states: dict[str, Any] = json.loads(state)
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(states["numpy"])
    set_state_of_steps(backend, state)


def set_state_of_steps(backend: "Backend", state: str) -> None:
    """`set_random_state` without what data is shuffled and changed with.

    Data may be read ahead, in other threads: where Python's and NumPy's
    states are in the middle of an epoch says nothing about its steps.
    """
    states = json.loads(state)
    keras_internals.set_global_seed(states["keras"])
    backend.set_random_state(states["framework"])


def code_of(state: str) -> int:
    """A number below 2**31 that tells states apart."""
    return zlib.crc32(state.encode()) >> 1


def chiefs_text(text: str, workers: "Workers") -> str:
    """The chief's text, on every worker.

    Args:
        text: String, which may be of another length elsewhere.
        workers: `Workers`.
    """
    own = np.frombuffer(text.encode(), "uint8").astype("int32")
    size = int(workers.chief_value(np.array([own.size], "int32"))[0])
    if not size:
        return ""
    padded = np.zeros(size, "int32")
    padded[: own.size] = own[:size]
    return bytes(workers.chief_value(padded).astype("uint8")).decode()


def everyones_texts(text: str, workers: "Workers") -> list[str]:
    """The texts of all workers, on every worker.

    Args:
        text: String, which may be of another length elsewhere.
        workers: `Workers`.
    """
    own = text.encode()
    sizes = workers.concatenate_numbers([len(own)])
    most = max(sizes)
    numbers = workers.concatenate_numbers([*own, *[0] * (most - len(own))])
    return [
        bytes(numbers[index * most : index * most + size]).decode()
        for index, size in enumerate(sizes)
    ]


@contextlib.contextmanager
def kept_random_state(backend: "Backend") -> Iterator[None]:
    """Puts the global random states back when it ends.

    Args:
        backend: `Backend`, which knows the framework's own state.
    """
    state = random_state(backend)
    try:
        yield
    finally:
        set_random_state(backend, state)
