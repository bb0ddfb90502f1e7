"""Initial values of sharded variables, made in parts on their devices."""

import copy
import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import initializers
from keras import ops

from keras_dist.errors import ReplicaDivergenceError
from keras_dist.plugins import current_strategy
from keras_dist.plugins import in_cross_replica_context
from keras_dist.plugins import is_of_keras
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.cluster.workers import JaxWorkers
from keras_dist_jax.machine import current_machine
from keras_dist_jax.machine import jit
from keras_dist_jax.sharding import shards
from keras_dist_jax.sharding.sharded_steps import Sharding
from keras_dist_jax.sharding.shards import Shards
from keras_dist_jax.throttle import Throttle

# Attributes of an initializer that make no other program.
_SEEDS = ("seed", "_init_seed")
_NO_KEY = (0, 0)


class InitialValues:
    """Runs Keras' initializers in programs that give each device its part."""

    def __init__(
        self, sharding: Sharding, throttle: Throttle, workers: JaxWorkers | None
    ) -> None:
        self._sharding = sharding
        self._throttle = throttle
        self._workers = workers
        self._programs: dict[Any, Any] = {}

    def make(self, variable: keras.Variable, initializer: object) -> bool:
        """Initializes a sharded variable; false if it has none, or for other
        initializers."""
        division = self._sharding.shards_for(variable)
        if division is None or not _is_known(initializer):
            return False
        shape, dtype = division.shape, variable.dtype
        settings = {
            k: v for k, v in vars(initializer).items() if k not in _SEEDS
        }
        spec = division.sharding.spec
        made = type(initializer), repr(settings), shape, str(dtype), spec
        if made not in self._programs:
            self._programs[made] = _program(division, initializer, dtype)
        key = _key_of(initializer)
        if self._workers is not None:
            key = self._chiefs(key, made, variable)
        array = self._throttle.run(
            self._programs[made], np.array(key, "uint32")
        )
        shards.begin(variable, division, array)
        return True

    def _chiefs(
        self, key: tuple[int, ...], made: Any, variable: keras.Variable
    ) -> tuple[int, ...]:
        """Returns the chief's key; all workers make the same variable."""
        assert self._workers is not None
        code = np.array([zlib.crc32(repr(made).encode()), *key], "uint32")
        numbers = code.view("int32").tolist()
        everyone = self._workers.concatenate_numbers(numbers)
        everyones = np.array(everyone, "int32").view("uint32").reshape(-1, 3)
        if len({*everyones[:, 0].tolist()}) > 1:
            raise ReplicaDivergenceError(
                "Workers made different variables, so they can't train "
                f"together.\nReceived: on this worker, '{variable.path}' of "
                f"shape {tuple(variable.shape)} and {variable.dtype}, by "
                f"{made[0].__name__}. Another worker made another one. "
                "Expected: the same shapes, dtypes and initializers in the "
                "same order. Run the same script, with the same settings, on "
                "every worker."
            )
        return tuple(everyones[0, 1:].tolist())


class _Seed(keras.random.SeedGenerator):
    """Stands for an initializer's seed while its program is traced."""

    def __init__(self, key: object) -> None:  # without a variable
        self._key = key

    def next(self, ordered: bool = True) -> Any:
        return self._key


def _is_known(initializer: object) -> bool:
    """Tells whether a program can run an initializer of Keras'."""
    is_constant = type(initializer) in (initializers.Zeros, initializers.Ones)
    is_random = hasattr(initializer, "seed")
    is_own = is_of_keras(type(initializer))
    return is_own and (is_constant or is_random) and current_machine() is None


def _key_of(initializer: object) -> tuple[int, ...]:
    if not hasattr(initializer, "seed"):
        return _NO_KEY
    drawn = internals.draw_seed(initializer.seed)
    return tuple(np.asarray(drawn).tolist())


def _program(
    division: Shards, initializer: Any, dtype: Any
) -> Callable[..., Any]:
    def start(key: Any) -> Any:
        its = copy.copy(initializer)
        if hasattr(its, "seed"):
            its.seed = _Seed(key)
        value = its(division.shape, dtype=dtype)
        return division.stored(ops.convert_to_tensor(value, dtype=dtype))

    def named(key: object) -> dict[str, Any]:
        return {"batch": key}

    program: Callable[..., Any] = jit(
        start, named, out_shardings=division.sharding
    )
    return program


def make_sharded(variable: keras.Variable, initializer: object) -> bool:
    """Initializes a variable of a strategy that shards it, in parts."""
    owner = vars(variable).get("distribute_strategy")
    if owner is None and in_cross_replica_context():
        owner = current_strategy()
    made: InitialValues | None = getattr(
        getattr(owner, "executor", None), "initial_values", None
    )
    return made is not None and made.make(variable, initializer)
