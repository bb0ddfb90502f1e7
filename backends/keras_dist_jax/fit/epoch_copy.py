"""The copy of a model's state that `fit` keeps while an epoch runs."""

import itertools
import os
import pathlib
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist_jax.machine import is_described
from keras_dist_jax.placement import arrays
from keras_dist_jax.placement.layout import Layout

Values = list[list[Any]]

# An environment variable: "always", "never", or "" to look at the memory.
VARIABLE = "KERAS_DIST_EPOCH_COPY"
# A copy may take this part of the host's free memory.
_PART = 4


def copied(values: Values, model: keras.Model, layout: Layout) -> Values | None:
    """Copies a model's state to the host; `None` if the copy is too large."""
    if any(map(is_described, itertools.chain(*values))):
        return values
    size = sum(map(arrays.bytes_here, itertools.chain(*values)))
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "always", "never"):
        raise ValueError(
            f"{VARIABLE} says whether `fit` keeps a copy of the state at the "
            f"start of an epoch. Received: {wish!r}. Expected: 'always', "
            "'never', or nothing, to keep it if there is memory."
        )
    free = None if wish else free_memory()
    fits = free is None or size <= free // _PART
    # All workers go back to the same state, whatever one of them was told.
    if not layout.is_for_all(fits and wish != "never"):
        if free is not None and not fits:
            _tell(model, size, free)
        return None
    return [arrays.to_host(group) for group in values]


def lost(error: BaseException) -> None:
    """Says in an error that there was no copy to go back to."""
    error.add_note(
        "`fit` kept no copy of the state at the start of the epoch, so the "
        "variables have what the failed step left, or nothing. Load a "
        f"checkpoint. With {VARIABLE}=always, `fit` keeps a copy in host "
        "memory."
    )


def _tell(model: keras.Model, size: int, free: int) -> None:
    if model in _warned:
        return
    _warned.add(model)
    sys.stderr.write(
        f"keras_dist: `fit` keeps no copy of the state of '{model.name}', "
        f"which takes {size / 1e9:.1f} GB, because {free / 1e9:.1f} GB of host "
        "memory are free. If a step fails on the device, the state is lost. "
        f"Keep checkpoints, or set {VARIABLE}=always.\n"
    )


# The models of which it was said.
_warned: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def free_memory() -> int | None:
    """Returns the bytes that this process may take; `None` if not known."""
    limits = [_left_in_group(), _available()]
    return min((limit for limit in limits if limit is not None), default=None)


def _available() -> int | None:
    for line in _lines("/proc/meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _left_in_group(folder: str = "/sys/fs/cgroup") -> int | None:
    """Returns what the limit of a container leaves."""
    limit = _lines(f"{folder}/memory.max")
    used = _lines(f"{folder}/memory.current")
    if not limit or not used or limit[0] == "max":
        return None
    # Pages of files that the system would give up.
    pairs = map(str.split, _lines(f"{folder}/memory.stat"))
    spare = sum(int(n) for name, n in pairs if name == "inactive_file")
    return max(0, int(limit[0]) - int(used[0]) + spare)


def _lines(path: str) -> Sequence[str]:
    try:
        return pathlib.Path(path).read_text().splitlines()
    except OSError:  # another system
        return ()
