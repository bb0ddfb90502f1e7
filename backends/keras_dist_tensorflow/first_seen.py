"""The first element of a dataset, looked at and put back."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class FirstSeen:
    """A dataset of which the first element is shown before it is used.

    It is read once: another pass would change the order of a dataset that
    shuffles, and take what a generator gives only once.

    Args:
        dataset: The `tf.data.Dataset`.
        see: Callable that takes the first element, or `None` if there is
            none.
    """

    def __init__(
        self, dataset: tf.data.Dataset, see: Callable[[Any], None]
    ) -> None:
        self._dataset = dataset
        self._see = see

    def __iter__(self) -> Any:
        iterator = iter(self._dataset)
        first = iterator.get_next_as_optional()
        if not first.has_value():
            self._see(None)
            return iterator
        self._see(first.get_value())
        rest = (
            tf.data.Dataset.counter()
            .map(lambda _: iterator.get_next_as_optional())
            .take_while(lambda element: element.has_value())
            .map(lambda element: element.get_value())
        )
        seen = tf.data.Dataset.from_tensors(first.get_value())
        return iter(seen.concatenate(rest))
