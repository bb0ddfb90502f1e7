"""Reads and writes of sharded variables by the chief alone.

The chief asks for one variable at a time, and the other workers serve it.
"""

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist_jax.cluster.workers import JaxWorkers
from keras_dist_jax.sharding import shards

_END, _READ, _WRITE = range(3)


class ChiefsRequests:
    """Requests for the whole values of variables that all workers list."""

    def __init__(
        self, workers: JaxWorkers, variables: Sequence[keras.Variable]
    ) -> None:
        self._workers = workers
        self._variables = variables
        self._places = {id(v): place for place, v in enumerate(variables)}

    @contextlib.contextmanager
    def asked_or_served(self) -> Iterator[None]:
        """Lets the chief use variables inside; others come in when it ends."""
        self._workers.barrier("all variables, to save or load them")
        if not self._workers.cluster.is_chief:
            while self._serves():
                pass
            yield
            return
        every = [shards.shards_of(variable) for variable in self._variables]
        for division in every:
            division.requests = self
        try:
            yield
        finally:
            for division in every:
                division.requests = None
            self._meet(_END, 0)

    def read(self, variable: keras.Variable) -> np.ndarray[Any, Any]:
        """Returns a variable's whole value, on the chief."""
        self._meet(_READ, self._places[id(variable)])
        return shards.gathered_on_host(variable)

    def write(self, variable: keras.Variable, value: object) -> None:
        """Replaces a variable's whole value, on the chief."""
        self._meet(_WRITE, self._places[id(variable)])
        self._take(variable, value)

    def _serves(self) -> bool:
        what, place = self._meet(_END, 0)
        variable = self._variables[place]
        if what == _READ:
            shards.gathered_on_host(variable)
        elif what == _WRITE:
            dtype = shards.stored(variable).dtype
            self._take(variable, np.empty(variable.shape, dtype))
        return what != _END

    def _take(self, variable: keras.Variable, value: object) -> None:
        """Gives each worker its part of the chief's value."""
        (value,) = self._workers.broadcast([value])
        shards.set_array(variable, shards.shards_of(variable).put(value))

    def _meet(self, what: int, place: int) -> tuple[int, int]:
        """Returns the chief's request."""
        everyone = self._workers.concatenate_numbers([what, place])
        return everyone[0], everyone[1]
