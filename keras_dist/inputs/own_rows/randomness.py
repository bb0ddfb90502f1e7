"""Random numbers that loading draws, apart from those of training.

Workers load different rows, so they may draw differently much. That must not
change the order of rows, which all of them draw alike.
"""

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_dist.plugin.randomness import seed_data
from keras_dist.plugin.randomness import set_states_of_data
from keras_dist.plugin.randomness import states_of_data
from keras_dist.plugin.replica import SEED_STRIDE


class OwnRandomness:
    """Contexts in which one source loads rows.

    The global generators of Python, NumPy and torch are seeded by the worker
    there, and get their states back. In another thread that would change what
    the program itself draws meanwhile, so there it is done only if the source
    was seen to draw.
    """

    def __init__(self, first_replica: int) -> None:
        self._first_replica = first_replica
        # The thread that loads first.
        self._thread: int | None = None
        self._count = 0
        # Whether the source draws, once it has loaded something.
        self._draws: bool | None = None

    @contextlib.contextmanager
    def alike(self) -> Iterator[None]:
        """All workers load the same rows here, and draw alike."""
        self._thread = self._thread or threading.get_ident()
        before = states_of_data()
        yield
        self._draws = self._draws or _differ(before, states_of_data())

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Each worker loads its own rows here."""
        self._thread = self._thread or threading.get_ident()
        if threading.get_ident() != self._thread and not self._draws:
            yield
            return
        outside = states_of_data()
        self._count += 1
        seed = random.getrandbits(32) + SEED_STRIDE * self._first_replica
        # A source that draws moves Python's state on by one draw, so that the
        # next seed is another one; the count is for one that draws at times.
        after = random.getstate() if self._draws else outside["python"]
        seed_data(seed + self._count)
        before = states_of_data() if self._draws is None else {}
        try:
            yield
        finally:
            if self._draws is None:
                self._draws = _differ(before, states_of_data())
            set_states_of_data({**outside, "python": after})


def _differ(states: dict[str, Any], others: dict[str, Any]) -> bool:
    if states["python"] != others["python"]:
        return True
    one, other = states["numpy"], others["numpy"]
    if one["state"]["pos"] != other["state"]["pos"]:
        return True
    if not np.array_equal(one["state"]["key"], other["state"]["key"]):
        return True
    return "torch" in states and (
        not np.array_equal(states["torch"], others["torch"])
    )
