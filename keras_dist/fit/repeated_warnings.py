"""Shows a warning that replicas of a step repeat once only."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from keras_dist.replica.state import current_replica


def hook_warn(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps `warnings.warn`.

    If the user's code warns on one replica, the others repeat it from the same
    place. On one device it is shown once.
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
        # This function adds a frame.
        original(message, category, stacklevel + 1, source, **options)

    return warn
