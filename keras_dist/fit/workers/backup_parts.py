"""Backups in parts, for `BackupAndRestore` of sharded variables."""

from collections.abc import Mapping
from typing import Any

import keras

from keras_dist.errors import UnsupportedBackendError
from keras_dist.fit.plain_models import strategy_of
from keras_dist.fit.workers import saving
from keras_dist.fit.workers.checkpoint_folder import CheckpointFolder
from keras_dist.fit.workers.training_state import TrainingState
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.powers import SavesParts
from keras_dist.plugin.workers import Workers

# Seconds within which a worker sees a shared folder, before the chief saves
# for all.
_PATIENCE = 2.0


class PartsBackup:
    """The backup in parts in a folder, which may not be there."""

    def __init__(self, path: str, workers: Workers) -> None:
        self._path = path
        self._workers = workers
        self._folder = CheckpointFolder(path, workers)

    def is_for(self, model: keras.Model) -> bool:
        """Returns whether all workers can save a model in parts here."""
        backend = get_backend()
        plan = getattr(strategy_of(model), "plan", None)
        if plan is None or not plan.shards_variables:
            return False
        if not isinstance(backend, SavesParts):
            return False
        everyone = self._workers.concatenate_numbers([_can_save(backend)])
        return all(everyone) and self._folder.is_shared(_PATIENCE)

    def restore(self, model: keras.Model) -> dict[str, Any] | None:
        """Restores a model; returns the notes, or `None` without a backup."""
        saving.wait()
        if not self._folder.exists():
            return None
        return TrainingState(model, self._path).restore()

    def save(self, model: keras.Model, notes: Mapping[str, Any]) -> None:
        """Saves a model, with the notes of the chief."""
        TrainingState(model, self._path).save(notes)

    def remove(self) -> None:
        """Removes the backup, on the chief: it has another one now."""
        self._folder.remove()


def refuse_parts(callbacks: Any) -> None:
    """Refuses Keras' own `BackupAndRestore` where workers saved in parts.

    It would not find their backup, and begin again.
    """
    given = getattr(callbacks, "callbacks", callbacks)
    for callback in keras.tree.flatten(given) if given else []:
        if not isinstance(callback, keras.callbacks.BackupAndRestore):
            continue
        path = callback.backup_dir
        if CheckpointFolder(path, None).exists():
            raise ValueError(
                "Only workers of MultiWorkerMirroredStrategy continue from a "
                "backup of sharded variables by themselves. Received: "
                f"BackupAndRestore('{path}'), where workers have saved. "
                f"Expected: `keras_dist.restore_sharded(model, '{path}')`, and "
                "`fit` with another folder and with `initial_epoch`."
            )


def _can_save(backend: SavesParts) -> int:
    try:
        backend.check_saving()
    except UnsupportedBackendError:
        return 0
    return 1
