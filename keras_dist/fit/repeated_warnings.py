"""Warnings that the replicas of a step repeat, of which one is enough."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from keras_dist.replica.state import current_replica


def hook_warn(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps `warnings.warn`.

    What the user's code says on one replica, the others say again from the
    same place. One device says it once.
    """

    @functools.wraps(original)
    def warn(
        message: Any,
        category: Any = None,
        stacklevel: int = 1,
        source: Any = None,
        **options: Any,
    ) -> None:
        state = current_replica()
        if state is not None:
            frame = sys._getframe(1)
            place = frame.f_code.co_filename, frame.f_lineno, str(message)
            if state.replica.repeats(place):
                return
        # One frame more: this function's.
        original(message, category, stacklevel + 1, source, **options)

    return warn
