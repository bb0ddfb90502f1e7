"""A worker process that calls a function, for `keras_dist.launch(fn)`.

`python -m keras_dist.launch.call FOLDER` reads the call from a file in
the folder and writes the result to another. The folder is private to the user
and nothing comes from the network: what is unpickled was pickled by the same
user's process.
"""

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from keras_dist.errors import RESTART_EXIT_CODE

MODULE = "keras_dist.launch.call"


@dataclass(frozen=True)
class Outcome:
    """The result of a worker's call: a value, or an exception."""

    pickled: bytes | None
    traceback: str = ""

    def load(self) -> Any:
        return None if self.pickled is None else pickle.loads(self.pickled)


def write_call(
    folder: Path,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    with open(folder / "call.pkl", "wb") as file:
        # The path comes first: unpickling the call may import modules.
        pickle.dump(sys.path, file)
        cloudpickle.dump((fn, tuple(args), dict(kwargs)), file)


def read_outcome(folder: Path, index: int) -> Outcome | None:
    """Returns the outcome of a worker's call, or `None` if it left none."""
    path = _path(folder, index)
    if not path.exists():
        return None
    outcome: Outcome = pickle.loads(path.read_bytes())
    return outcome


def work() -> None:
    folder = Path(sys.argv[1])
    index = int(os.environ["KERAS_DIST_WORKER_INDEX"])
    status = 0
    try:
        outcome = Outcome(cloudpickle.dumps(_call(folder)))
    except Exception as error:
        outcome = Outcome(_portable(error), _traceback_of(error))
        status = RESTART_EXIT_CODE if _lost_a_peer(error) else 1
    unfinished = folder / f"{index}.unfinished"
    unfinished.write_bytes(pickle.dumps(outcome))
    os.replace(unfinished, _path(folder, index))
    sys.exit(status)


def _call(folder: Path) -> Any:
    with open(folder / "call.pkl", "rb") as file:
        sys.path[:] = pickle.load(file)
        fn, args, kwargs = pickle.load(file)
    return fn(*args, **kwargs)


def _path(folder: Path, index: int) -> Path:
    return folder / f"{index}.pkl"


def _portable(error: Exception) -> bytes | None:
    """Returns the pickled exception, or `None` if it can't be restored."""
    try:
        data: bytes = cloudpickle.dumps(error)
        same = type(pickle.loads(data)) is type(error)
    except Exception:
        # The exception's own methods may raise anything.
        return None
    return data if same else None


def _traceback_of(error: Exception) -> str:
    """Returns the traceback, from the user's function on."""
    frames = error.__traceback__
    for _ in range(2):
        if frames is not None and frames.tb_next is not None:
            frames = frames.tb_next
    return "".join(traceback.format_exception(error.with_traceback(frames)))


def _lost_a_peer(error: Exception) -> bool:
    """Returns true for a `WorkerLostError`, without importing the class."""
    return any(
        kind.__name__ == "WorkerLostError" for kind in type(error).__mro__
    )


if __name__ == "__main__":
    # Imported by name: classes of `__main__` could not be unpickled elsewhere.
    from keras_dist.launch import call

    call.work()
