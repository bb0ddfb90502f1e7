"""State that a replica's thread inherits from the thread that runs the step."""

from collections.abc import Callable

import torch

from keras_dist.internals.keras_internals import inherit_thread_state
from keras_dist.internals.keras_internals import thread_state


def capture_thread() -> Callable[[], None]:
    """Captures this thread's state in a function that sets it in another."""
    state = thread_state()
    gradients = torch.is_grad_enabled()
    types = {"cpu"}
    if torch.accelerator.is_available():
        types.add(torch.accelerator.current_accelerator().type)
    autocast = [
        (
            each,
            torch.is_autocast_enabled(each),
            torch.get_autocast_dtype(each),
        )
        for each in sorted(types)
    ]

    def inherit() -> None:
        inherit_thread_state(state)
        torch.set_grad_enabled(gradients)
        for each, enabled, dtype in autocast:
            torch.set_autocast_enabled(each, enabled)
            torch.set_autocast_dtype(each, dtype)

    return inherit
