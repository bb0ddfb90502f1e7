"""What a replica's thread takes over from the thread that runs the step."""

from collections.abc import Callable

import torch

from keras_dist.training.keras_internals import inherit_thread_state
from keras_dist.training.keras_internals import thread_state


def capture_thread() -> Callable[[], None]:
    """Reads this thread's state; the result gives it to another thread."""
    state = thread_state()
    gradients = torch.is_grad_enabled()

    def inherit() -> None:
        inherit_thread_state(state)
        torch.set_grad_enabled(gradients)

    return inherit
