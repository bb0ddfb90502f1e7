"""Differentiates: what a backend has that can compute gradients."""

from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras

# The value, what else the function returned, and the gradients: first the
# variables', then the tensors'.
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
        """Calls `fn(*tensors)` once, and differentiates what it returns.

        What `fn` assigns to variables is theirs when this returns.

        Args:
            fn: Callable. Returns a tuple of a float scalar and anything.
            variables: Sequence of different float variables.
            tensors: Sequence of float tensors.

        Returns:
            Tuple of the scalar, the other thing that `fn` returned, and a
            list of gradients, the variables' first: `None` for what `fn` did
            not use.
        """
