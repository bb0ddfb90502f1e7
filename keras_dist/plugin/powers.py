"""What backends and executors have that split an optimizer's state."""

import contextlib
from abc import ABC
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.plugin.backend import get_backend


class ShardsOptimizerState:
    """A `Backend` whose executors carry out plans that shard it.

    An executor then keeps a part of each variable of an optimizer on each
    replica, as long as `Plan.shards_optimizer` says so.
    """


class UpdatesParts(ABC):
    """A `ReplicaRunner` whose replicas update a part of each variable."""

    @abstractmethod
    def update_parts(
        self,
        optimizer: Any,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable] | None,
    ) -> None:
        """Sums gradients over replicas and updates, in a meeting of them.

        Args:
            optimizer: A `keras.optimizers.Optimizer`, built.
            gradients: For each local replica that takes part, its gradients,
                `None` where there is none.
            weights: For each of these replicas, its weight.
            variables: Sequence of the variables that they belong to, `None`
                for all that the optimizer was built for.

        Raises:
            UnsupportedModelError: If the optimizer needs whole variables.
        """


class KeepsParts(ABC):
    """An executor that keeps a part of an optimizer's variables only.

    On several workers, reading such a variable takes all of them. These let
    one worker alone read, or write, for a while. All enter them together.
    """

    @abstractmethod
    def readable_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> contextlib.AbstractContextManager[Any]:
        """Inside, the chief has whole values, in its host's memory.

        Args:
            variables: Sequence of variables, in the same order on each
                worker.
        """

    @abstractmethod
    def written_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> contextlib.AbstractContextManager[Any]:
        """Inside, the chief alone assigns; then each takes its parts of that.

        Args:
            variables: Sequence of variables, in the same order on each
                worker.
        """


def check_optimizer_state(optimizer_state: str) -> bool:
    """Whether a user asks for a sharded optimizer state.

    Args:
        optimizer_state: String, `"mirrored"` or `"sharded"`.

    Raises:
        ValueError: If it is something else, or if the backend can't do it.
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
