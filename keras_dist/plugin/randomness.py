"""Makes all workers draw the same random numbers, those of the chief."""

import contextlib
import json
import random
import sys
import zlib
from collections.abc import Iterator
from collections.abc import Mapping
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
    """Returns the random states of data, Keras and the framework."""
    return json.dumps(
        {
            **states_of_data(),
            "keras": keras_random.global_seed(),
            "framework": backend.random_state(),
        },
        default=lambda array: array.tolist(),
    )


def states_of_data() -> dict[str, Any]:
    """Returns the states of the global generators that data draws from.

    They are Python's, NumPy's and, if it is in use, those of PyTorch, whose
    `DataLoader` shuffles by it, with any backend.
    """
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.default_generator.get_state().numpy()
    return states


def set_states_of_data(states: Mapping[str, Any]) -> None:
    """Restores what `states_of_data` has returned, of any worker."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(states["numpy"])
    torch = sys.modules.get("torch")
    if torch is not None and "torch" in states:
        state = np.array(states["torch"], "uint8")
        torch.default_generator.set_state(torch.from_numpy(state))


def seed_data(seed: int) -> None:
    """Seeds the generators of `states_of_data`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(seed % 2**63)


def set_random_state(backend: Backend, state: str) -> None:
    """Restores the states from `random_state`, of any worker."""
    states: dict[str, Any] = json.loads(state)
    set_states_of_data(states)
    set_state_of_steps(backend, state)


def set_state_of_steps(backend: Backend, state: str) -> None:
    """Restores the states of Keras and the framework only. Data, which may be
    read ahead, draws from the others."""
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
