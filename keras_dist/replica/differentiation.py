"""`Differentiates`: the interface of backends that compute gradients."""

import contextlib
import threading
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.errors import UnsupportedModelError
from keras_dist.replica.scopes import values_are_replaced

# The value, the function's other result, and the gradients: first those of the
# variables, then those of the tensors.
Differentiated = tuple[Any, Any, list[Any]]


class Differentiates(ABC):
    """A `Backend` that can differentiate functions of Keras variables."""

    @abstractmethod
    def differentiate(
        self,
        fn: Callable[..., tuple[Any, Any]],
        variables: Sequence[keras.Variable],
        tensors: Sequence[Any],
    ) -> Differentiated:
        """Calls `fn(*tensors)` once, and differentiates its first result.

        Values that `fn` assigns to variables are in place when this returns.

        Args:
            fn: Callable. Returns a tuple of a float scalar and anything.
            variables: Sequence of different float variables.
            tensors: Sequence of float tensors.

        Returns:
            Tuple of the scalar, the other result of `fn`, and a list of
            gradients, those of the variables first: `None` for each that `fn`
            did not use.
        """


class _Current(threading.local):
    depth = 0


current = _Current()


@contextlib.contextmanager
def differentiating() -> Iterator[None]:
    """Marks that this thread calls a function that is differentiated."""
    current.depth += 1
    try:
        yield
    finally:
        current.depth -= 1


def check_run_counts(strategy: Any) -> None:
    """Refuses `strategy.run` where a derivative would not reach the replicas.

    Replicas read the variables themselves, in threads or in programs of their
    own, so that a tape or replaced values outside of `run` have no effect.

    Raises:
        UnsupportedModelError: In a function that is differentiated, or in a
            `keras.StatelessScope`.
    """
    if current.depth:
        raise UnsupportedModelError(
            "`strategy.run` was called in a function that is being "
            f"differentiated. Received: {strategy!r}, whose "
            f"{strategy.num_replicas_in_sync} replicas no gradient from "
            "outside reaches. Expected: `keras_dist.gradient` or "
            "`value_and_grad` in the function that `strategy.run` calls, on "
            "each replica, and the gradients summed after that: "
            "`strategy.reduce('SUM', strategy.run(lambda: "
            "keras_dist.gradient(loss_fn, variables)), axis=None)`, or "
            "`optimizer.apply` in the replica function."
        )
    if values_are_replaced():
        raise UnsupportedModelError(
            "`strategy.run` was called in a `keras.StatelessScope`, whose "
            "values of variables replicas would not see. Received: "
            f"{strategy!r}, with {strategy.num_replicas_in_sync} replicas. "
            "Expected: no scope around `run`. Open it in the function that "
            "`strategy.run` calls, on each replica."
        )
