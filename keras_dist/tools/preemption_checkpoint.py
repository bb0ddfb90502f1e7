"""The checkpoints of a `PreemptionCheckpointHandler`."""

import json
import os
from abc import ABC
from abc import abstractmethod
from typing import Any
from typing import final

import keras

from keras_dist.errors import ClusterError
from keras_dist.fit.workers.sync import written_beside
from keras_dist.fit.workers.training_state import TrainingState
from keras_dist.plugin.workers import Workers

_NAME = "preemption"
_RUN_CALLS = "run_calls"


class PreemptionCheckpoint(ABC):
    """A checkpoint on disk, with the number of calls of `run` before it."""

    @abstractmethod
    def save(self, run_calls: int, *args: Any, **kwargs: Any) -> None:
        """Saves; every worker calls it."""

    @abstractmethod
    def restore(self) -> int:
        """Restores on every worker; returns the number of calls of `run`."""


@final
class CheckpointOfModel(PreemptionCheckpoint):
    """The checkpoint of a `keras.Model`."""

    def __init__(
        self, model: keras.Model, folder: str, workers: Workers | None
    ) -> None:
        path = os.path.join(folder, _NAME)
        file = f"{path}.weights.h5"
        self._state = TrainingState(model, path, file, workers)

    def save(self, run_calls: int, *args: Any, **kwargs: Any) -> None:
        self._state.save({_RUN_CALLS: run_calls})

    def restore(self) -> int:
        notes = self._state.restore() or {}
        return int(notes.get(_RUN_CALLS, 0))


@final
class CheckpointOfObject(PreemptionCheckpoint):
    """The checkpoint of an object with `save` and `load` or `restore`.

    Each checkpoint has a new name, which a JSON file names: a process that is
    killed while it saves leaves the previous one intact.
    """

    def __init__(
        self, thing: Any, folder: str, workers: Workers | None
    ) -> None:
        self._thing = thing
        self._folder = os.fspath(folder)
        self._json = os.path.join(folder, f"{_NAME}.json")
        self._workers = workers

    def save(self, run_calls: int, *args: Any, **kwargs: Any) -> None:
        if self._workers is not None and not self._workers.cluster.is_chief:
            return
        os.makedirs(self._folder, exist_ok=True)
        if _is_manager(self._thing):
            path = self._thing.save(*args, **kwargs)
        else:
            path = os.path.join(self._folder, f"{_NAME}-{run_calls}")
            # A `tf.train.Checkpoint` adds a number to the name.
            path = self._thing.save(path) or path
        notes = {_RUN_CALLS: run_calls, "path": os.fspath(path)}
        with written_beside(self._json) as beside, open(beside, "w") as file:
            json.dump(notes, file)

    def restore(self) -> int:
        text = self._notes()
        if self._workers is not None:
            local_text, text = text, self._workers.chiefs_text(text)
            self._check_shared(local_text == text)
        if not text:
            return 0
        notes = json.loads(text)
        thing = self._thing
        if _is_manager(thing):
            thing = thing.checkpoint
        load = getattr(thing, "restore", None) or thing.load
        load(notes["path"])
        return int(notes[_RUN_CALLS])

    def _notes(self) -> str:
        if not os.path.exists(self._json):
            return ""
        with open(self._json) as file:
            return file.read()

    def _check_shared(self, is_same: bool) -> None:
        """Raises `ClusterError` on all workers if one can't see the folder."""
        assert self._workers is not None
        flags = self._workers.concatenate_numbers([int(is_same)])
        missing = [index for index, flag in enumerate(flags) if not flag]
        if missing:
            raise ClusterError(
                f"Workers {missing} don't see what the chief has saved.\n"
                f"Received: checkpoint_dir='{self._folder}'. Expected: a "
                "folder that all workers share. Or pass the `keras.Model`: "
                "then only the chief needs the file."
            )


def checkpoint_of(
    thing: object, folder: str | None, workers: Workers | None
) -> PreemptionCheckpoint:
    """Returns the checkpoint for a model, a manager or another object."""
    if folder is None:
        folder = getattr(thing, "directory", None)
    if folder is None:
        raise ValueError(
            "`checkpoint_dir` must say where to save. Received: None, with "
            f"{thing!r}, which has no folder of its own. Pass a folder."
        )
    if isinstance(thing, keras.Model):
        return CheckpointOfModel(thing, folder, workers)
    loads = hasattr(thing, "load") or hasattr(thing, "restore")
    if hasattr(thing, "save") and (loads or _is_manager(thing)):
        return CheckpointOfObject(thing, folder, workers)
    raise ValueError(
        "`checkpoint_or_checkpoint_manager` must be an object to save. "
        f"Received: {thing!r} of type {type(thing).__name__}. Expected: a "
        "keras.Model, or an object with `save(path)` and `load(path)`."
    )


def _is_manager(thing: object) -> bool:
    return hasattr(thing, "latest_checkpoint") and hasattr(thing, "checkpoint")
