"""TraceLog: optional messages about the reasons for traces."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import keras

VARIABLE = "KERAS_DIST_EXPLAIN_TRACES"


class TraceLog:
    """A log of one function's traces on standard error, with reasons.

    It is written if the environment variable `KERAS_DIST_EXPLAIN_TRACES` is
    set to anything but 0.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: str | None = None

    def note(self, leaves: Sequence[Any], why: str | None = None) -> None:
        """Logs a trace with its traced arguments.

        `why` is the reason, unless it follows from the arguments.
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
