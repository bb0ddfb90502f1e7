"""A door to Keras' private names for random numbers.

| name | why |
|---|---|
| the global attribute `global_seed_generator` | begins where Keras' own would |
| the global attribute `object_name_uids` | it is named as Keras' own |
| the name `seed_generator_state` | marks the states of seed generators |
| `keras.src.backend.random` | replicas draw for the global batch |
| `keras.src.random.seed_generator.draw_seed` | moves seeds on |
"""

import collections
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras

from keras_dist.internals.private_names import private

global_state = private("keras.src.backend.common.global_state")
random_backend = private("keras.src.backend.random")
draw_seed = private("keras.src.random.seed_generator.draw_seed")

_GENERATOR = "global_seed_generator"
_NAME_COUNTS = "object_name_uids"


class SeedGenerator(keras.random.SeedGenerator):
    """A seed generator that begins, and draws its seed, when it is used.

    That may be in a trace, on one of several replicas, or in a scope. The
    generator belongs to none of them. Keras names it by its class.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        # Called for attributes that are not there, so before it begins.
        if name not in ("_initial_seed", "backend", "name", "state"):
            raise AttributeError(f"'{type(self).__name__}' has no '{name}'.")
        with self._lock:
            if not self.has_begun:
                # The thread below counts names as this one.
                counts = global_state.get_global_attribute(
                    _NAME_COUNTS, collections.defaultdict(int), True
                )
                with ThreadPoolExecutor(1) as apart:
                    apart.submit(self._begin, counts).result()
        return object.__getattribute__(self, name)

    @property
    def has_begun(self) -> bool:
        """True once a seed was drawn."""
        return "state" in vars(self)

    def _begin(self, counts: object) -> None:
        global_state.set_global_attribute(_NAME_COUNTS, counts)
        super().__init__(self._seed)


def lend_global_seed() -> None:
    """Has this thread's draws without a seed come from a generator that traces
    and other threads can use. It begins where Keras' own would."""
    if global_state.get_global_attribute(_GENERATOR) is None:
        global_state.set_global_attribute(_GENERATOR, SeedGenerator())


@contextlib.contextmanager
def global_seed_lent() -> Iterator[None]:
    """Does `lend_global_seed` for the context, and longer if it has begun."""
    is_first = global_state.get_global_attribute(_GENERATOR) is None
    lend_global_seed()
    try:
        yield
    finally:
        if is_first and _begun() is None:
            global_state.set_global_attribute(_GENERATOR, None)


def _begun() -> Any:
    generator = global_state.get_global_attribute(_GENERATOR)
    is_late = isinstance(generator, SeedGenerator)
    return None if is_late and not generator.has_begun else generator


def global_seed() -> list[int] | None:
    """Returns the state of Keras' global seed generator, if it has begun."""
    generator = _begun()
    if generator is None:
        return None
    state: list[int] = keras.ops.convert_to_numpy(generator.state).tolist()
    return state


def set_global_seed(state: list[int] | None) -> None:
    """Restores a state from `global_seed`, of this process or another one."""
    if state is None:
        global_state.set_global_attribute(_GENERATOR, None)
        return
    generator = _begun() or SeedGenerator(state[0])
    global_state.set_global_attribute(_GENERATOR, generator)
    keras.Variable.assign(generator.state, state)


def is_seed(variable: keras.Variable) -> bool:
    """Returns whether a variable is a `SeedGenerator`'s state."""
    # Not compared between replicas: that would wait for the device.
    return bool(variable.name == "seed_generator_state")
