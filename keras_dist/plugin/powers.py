"""Interfaces of backends and executors that shard an optimizer's state."""

import contextlib
from abc import ABC
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.plugin.backend import get_backend


class ShardsOptimizerState:
    """A `Backend` whose executors can shard an optimizer's state.

    With `Plan.shards_optimizer`, an executor keeps on each replica a shard of
    each variable of an optimizer.
    """


class UpdatesParts(ABC):
    """A `ReplicaRunner` whose replicas update a shard of each variable."""

    @abstractmethod
    def update_parts(
        self,
        optimizer: Any,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable] | None,
    ) -> None:
        """Sums gradients over replicas, and lets each update its shards.

        All replicas wait for each other in the call.

        Args:
            optimizer: A built `keras.optimizers.Optimizer`.
            gradients: Sequence with the gradients of each local replica that
                takes part, `None` for variables without one.
            weights: Sequence with the weight of each of these replicas.
            variables: Sequence of the gradients' variables; `None` for all
                that the optimizer was built for.

        Raises:
            UnsupportedModelError: If the optimizer needs whole variables.
        """


class KeepsParts(ABC):
    """An executor that keeps only shards of an optimizer's variables.

    On several workers, reading such a variable is a collective. In these
    contexts, which all workers enter together, the chief alone may read or
    write.
    """

    @abstractmethod
    def readable_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns a context with the whole values in the chief's host memory.

        `variables` are in the same order on each worker.
        """

    @abstractmethod
    def written_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the chief alone assigns whole values.

        At its end each worker takes its shards of these values. `variables`
        are in the same order on each worker.
        """


def check_optimizer_state(optimizer_state: str) -> bool:
    """Returns true for `"sharded"` and false for `"mirrored"`.

    Raises `ValueError` for anything else, or if the backend can't shard an
    optimizer's state.
    """
    if optimizer_state not in ("mirrored", "sharded"):
        raise ValueError(
            "`optimizer_state` says where an optimizer's variables are. "
            f"Received: {optimizer_state!r}. Expected: 'mirrored' or "
            "'sharded'."
        )
    shards = optimizer_state == "sharded"
    if shards and not isinstance(get_backend(), ShardsOptimizerState):
        raise ValueError(
            f"The backend '{keras.backend.backend()}' keeps a copy of the "
            "optimizer's variables on each replica. Received: "
            "optimizer_state='sharded'. Expected: 'mirrored', or a backend "
            "that can shard it ('jax' or 'torch'), chosen with KERAS_BACKEND."
        )
    return shards
