"""A look at a step of `fit`: whether it could be compiled."""

import contextlib
from collections.abc import Iterator
from typing import Any

# What the sums are for that a compiled graph can make.
SUMMED = (
    "the batch statistics of layer",
    "the divisor of a loss",
    "a sum over rows",
    "the gradient of ",
)


class Look:
    """A step that is looked at: why it can't be compiled, if so."""

    def __init__(self) -> None:
        self.problem = ""
        # How many masks of dropouts it draws.
        self.num_masks = 0
        self._place = ""
        self._num_updates = 0

    def meets(self, what: str) -> None:
        """The replica meets others for something."""
        self._place = what

    def calls(self, what: str) -> None:
        """This worker exchanges values with the others."""
        self._num_updates += what == "gradients"
        if self._num_updates > 1:
            self.note("it makes several updates")
        elif what != "gradients" and not what.startswith(SUMMED):
            is_update = self._place.startswith("the update")
            self.note(
                "it assigns variables, which workers compare"
                if is_update
                else f"workers exchange values for {self._place or what}"
            )

    def draws(self, is_compilable: bool) -> None:
        """The replica draws random numbers: the mask of a dropout that a graph
        can have, or others."""
        self.num_masks += 1
        if not is_compilable:
            self.note("it draws random numbers")

    def note(self, problem: str) -> None:
        """Notes why the step can't be compiled."""
        self.problem = self.problem or problem


@contextlib.contextmanager
def looking(workers: Any) -> Iterator[Look]:
    """Looks at a step inside."""
    workers.look = look = Look()
    try:
        yield look
    finally:
        workers.look = None
