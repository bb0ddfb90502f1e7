"""Replacements for the updates of optimizers while a step is traced."""

import contextlib
from abc import ABC
from abc import abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist_jax import keras_internals as internals


class Updates(ABC):
    """Updates of optimizers in a trace, in place of Keras' own."""

    # Keras' own method runs for updates without gradients, for an optimizer
    # that is not built, and for the updates that one update is made of.

    def __init__(self) -> None:
        self._is_inside = False

    @abstractmethod
    def of_values(
        self,
        optimizer: keras.Optimizer,
        original: object,
        state: object,
        grads: object,
        values: object,
    ) -> Any:
        """Replaces `stateless_apply`, which is `original`, of an optimizer."""

    @abstractmethod
    def of_variables(
        self,
        optimizer: keras.Optimizer,
        original: object,
        grads: object,
        variables: object,
    ) -> None:
        """Replaces `apply`, which is `original`, of an optimizer."""

    @contextlib.contextmanager
    def replacing(
        self, optimizers: Sequence[keras.optimizers.Optimizer]
    ) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for optimizer in optimizers:
                undo.enter_context(self._replacing(optimizer))
            yield

    def _replacing(
        self, optimizer: Any
    ) -> contextlib.AbstractContextManager[None]:
        apply, apply_values = optimizer.apply, optimizer.stateless_apply

        def is_own(grads: list[Any]) -> bool:
            return self._is_inside or not optimizer.built or not grads

        def of_values(
            optimizer_variables: Any, grads: Any, trainable_variables: Any
        ) -> Any:
            state, grads = list(optimizer_variables), list(grads)
            args = state, grads, list(trainable_variables)
            if is_own(grads):
                return apply_values(*args)
            with internals.replaced(self, _is_inside=True):
                return self.of_values(optimizer, apply_values, *args)

        def of_variables(grads: Any, trainable_variables: Any = None) -> None:
            args = list(grads), trainable_variables
            if is_own(args[0]):
                apply(*args)
                return
            with internals.replaced(self, _is_inside=True):
                self.of_variables(optimizer, apply, *args)

        return internals.replaced(
            optimizer, apply=of_variables, stateless_apply=of_values
        )
