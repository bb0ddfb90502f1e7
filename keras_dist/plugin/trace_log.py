"""Why compiled functions are traced, for those who ask."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import keras

VARIABLE = "KERAS_DIST_EXPLAIN_TRACES"


class TraceLog:
    """Says why a function is traced, if the environment variable
    `KERAS_DIST_EXPLAIN_TRACES` is set to something other than 0.

    Args:
        name: String, the function's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: str | None = None

    def note(self, leaves: Sequence[Any], why: str | None = None) -> None:
        """Notes a trace.

        Args:
            leaves: Sequence of the traced arguments.
            why: String, the reason where that is not the arguments.
        """
        if os.environ.get(VARIABLE, "0") in ("", "0"):
            return
        described = ", ".join(map(_described, leaves)) or "nothing"
        before, self._last = self._last, described
        if why is None and before is None:
            why = "its first call with such a structure of arguments"
        elif why is None and before == described:
            why = "another value that is not traced, or new variables"
        elif why is None:
            why = f"arguments of other shapes or dtypes; before: {before}"
        sys.stderr.write(
            f"keras_dist: '{self._name}' is traced for {described}: {why}\n"
        )


def _described(leaf: Any) -> str:
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    return f"{dtype}[{','.join(map(str, leaf.shape))}]"
