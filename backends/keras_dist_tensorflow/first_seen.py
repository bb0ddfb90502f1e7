"""Datasets whose first element is shown before it is used."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf


class FirstSeen:
    """A dataset that calls `see` with its first element, and keeps it.

    An empty dataset calls `see(None)`. Each iteration is one pass over the
    data: a second one would change the order of a dataset that shuffles, and
    find a generator exhausted.
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
