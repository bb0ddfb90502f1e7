"""The checkpoints of a `PreemptionCheckpointHandler`."""

import json
import os
from abc import ABC
from abc import abstractmethod
from typing import Any
from typing import final

import keras

from keras_dist.errors import ClusterError
from keras_dist.fit.workers.built import built_for
from keras_dist.fit.workers.state_file import restore_state
from keras_dist.fit.workers.state_file import write_state
from keras_dist.fit.workers.together import readable_by_chief
from keras_dist.fit.workers.together import written_beside
from keras_dist.plugin.workers import Workers

_NAME = "preemption"
_RUN_CALLS = "run_calls"


class PreemptionCheckpoint(ABC):
    """A checkpoint on disk, with the number of calls of `run` before it."""

    def __init__(self, folder: str, workers: Workers | None) -> None:
        self.folder = os.fspath(folder)
        self.workers = workers
        self.is_chief = workers is None or workers.cluster.is_chief

    def path(self, suffix: str) -> str:
        return os.path.join(self.folder, _NAME + suffix)

    def save(self, run_calls: int, *args: Any, **kwargs: Any) -> None:
        """Saves if this worker is the chief; every worker calls it."""
        if self.is_chief:
            os.makedirs(self.folder, exist_ok=True)
            self.write(run_calls, *args, **kwargs)

    @abstractmethod
    def write(self, run_calls: int, *args: Any, **kwargs: Any) -> None:
        """Writes the files, on the chief."""

    @abstractmethod
    def restore(self) -> int:
        """Restores on every worker; returns the number of calls of `run`."""


@final
class CheckpointOfModel(PreemptionCheckpoint):
    """The checkpoint of a `keras.Model`: one file, read by the chief alone."""

    def __init__(
        self, model: keras.Model, folder: str, workers: Workers | None
    ) -> None:
        super().__init__(folder, workers)
        if not model.built:
            raise ValueError(
                "PreemptionCheckpointHandler restores a model at once, so "
                f"the model must be built. Received: model '{model.name}', "
                "which is not built. Build it with "
                "`model.build(input_shape)`, or call it on a batch."
            )
        self._model = model

    def save(self, run_calls: int, *args: Any, **kwargs: Any) -> None:
        built = built_for(self._model)
        with readable_by_chief(self._model):
            super().save(run_calls, built)

    def write(self, run_calls: int, *args: Any, **kwargs: Any) -> None:
        path, (built,) = self.path(".weights.h5"), args
        write_state(self._model, path, {_RUN_CALLS: run_calls}, built)

    def restore(self) -> int:
        path = self.path(".weights.h5")
        notes = restore_state(self._model, path, self.workers) or {}
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
        super().__init__(folder, workers)
        self._thing = thing

    def write(self, run_calls: int, *args: Any, **kwargs: Any) -> None:
        if _is_manager(self._thing):
            path = self._thing.save(*args, **kwargs)
        else:
            path = self.path(f"-{run_calls}")
            # A `tf.train.Checkpoint` adds a number to the name.
            path = self._thing.save(path) or path
        notes = {_RUN_CALLS: run_calls, "path": os.fspath(path)}
        with (
            written_beside(self.path(".json")) as beside,
            open(beside, "w") as file,
        ):
            json.dump(notes, file)

    def restore(self) -> int:
        text = self._notes() if self.is_chief else ""
        if self.workers is not None:
            text = self.workers.chiefs_text(text)
            self._check_shared(text)
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
        path = self.path(".json")
        if not os.path.exists(path):
            return ""
        with open(path) as file:
            return file.read()

    def _check_shared(self, text: str) -> None:
        """Raises `ClusterError` on all workers if one can't see the folder."""
        assert self.workers is not None
        flags = self.workers.concatenate_numbers([int(self._notes() != text)])
        missing = [index for index, flag in enumerate(flags) if flag]
        if missing:
            raise ClusterError(
                f"Workers {missing} don't see what the chief has saved. "
                f"Received: checkpoint_dir='{self.folder}'. Expected: a "
                "folder that all workers share. Or pass the `keras.Model`: "
                "then only the chief needs the file."
            )


def checkpoint_of(
    thing: Any, folder: str | None, workers: Workers | None
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


def _is_manager(thing: Any) -> bool:
    return hasattr(thing, "latest_checkpoint") and hasattr(thing, "checkpoint")
