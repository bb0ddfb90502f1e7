"""Membership of this process in a cluster, reported to its launcher."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

# A file that `keras-dist run` looks for when the worker ends.
JOINED_FILE = "KERAS_DIST_JOINED_FILE"
# Set to 1 by `keras-dist run --independent`.
INDEPENDENT = "KERAS_DIST_INDEPENDENT"

_joined: set[int] = set()


def note_joined() -> None:
    """Notes that this process has joined a cluster, and tells its launcher."""
    _joined.add(os.getpid())
    path = os.environ.get(JOINED_FILE)
    if not path:
        return
    try:
        Path(path).touch()
    except OSError as error:
        warnings.warn(
            f"This worker can't tell its launcher that it joined the others: "
            f"{error}. `keras-dist run` will take it for one that trained "
            "alone. Let workers write to that folder, or pass --independent.",
            stacklevel=2,
        )


def has_joined() -> bool:
    """Returns true if this process belongs to a cluster."""
    return os.getpid() in _joined


def is_independent(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns true if the user wants workers to train independently."""
    return environ.get(INDEPENDENT, "0") not in ("", "0")
