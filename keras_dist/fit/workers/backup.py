"""`keras.callbacks.BackupAndRestore` on several workers.

The chief saves, or each worker its parts of sharded variables. All go on from
the backup at the same step, with the same weights, seeds and random states, so
that data is shuffled as without a stop.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.fit.workers import state_file
from keras_dist.fit.workers.backup_parts import PartsBackup
from keras_dist.fit.workers.built import Built
from keras_dist.fit.workers.built import built_for
from keras_dist.fit.workers.together import learning_rates
from keras_dist.fit.workers.together import readable_by_chief
from keras_dist.fit.workers.together import written_beside
from keras_dist.internals.keras_data import read_execution
from keras_dist.internals.keras_data import set_initial_epoch
from keras_dist.internals.keras_data import set_shuffling_epoch
from keras_dist.internals.keras_data import shuffling_epoch
from keras_dist.internals.keras_internals import build_from
from keras_dist.plugin.backend import Backend
from keras_dist.plugin.randomness import random_state
from keras_dist.plugin.randomness import set_random_state
from keras_dist.plugin.randomness import set_state_of_steps
from keras_dist.plugin.workers import Workers

_METHODS = ("on_train_batch_begin", "on_train_batch_end")
_ABSENT = object()


class Restore(keras.callbacks.Callback):
    """The stand-in for a user's `BackupAndRestore` that restores a backup."""

    def __init__(self, callback: Any, workers: Workers) -> None:
        super().__init__()
        self._workers = workers
        self._paths = Paths(callback.backup_dir)
        self._parts = PartsBackup(self._paths.folder, workers)
        # Where to save parts; `None` if the chief saves all.
        self.parts: PartsBackup | None = None
        # Notes of the restored backup, such as its epoch and step.
        self.notes: dict[str, Any] = {}
        # The iterator of `fit`, if it shuffles its data.
        self.shuffled: Any = None

    def remove_parts(self) -> None:
        """Removes a backup in parts, on the chief."""
        self._parts.remove()

    def note_shuffled(self, iterator: Any) -> None:
        """Notes the iterator that `fit` has made of its data."""
        self.shuffled = iterator

    def on_train_begin(self, logs: Any = None) -> None:
        model = self.model
        if not model.built:
            raise ValueError(
                "BackupAndRestore needs a model that is built before `fit`. "
                f"Received: model '{model.name}', which is not built. Build "
                "it with `model.build(input_shape)`, or call it on a batch."
            )
        paths = self._paths
        notes = self._parts.restore(model)
        if notes is None:
            with paths.readable() as path:
                notes = state_file.restore_state(model, path, self._workers)
        self.parts = self._parts if self._parts.is_for(model) else None
        if notes is not None and "epoch" not in notes:
            notes = {"epoch": paths.epoch_of_keras(), "step": 0}
        self.notes = notes or {}
        if self.notes:
            set_initial_epoch(model, self.notes["epoch"])
        # `None` in a backup of an older Keras; absent in one of Keras' own.
        if self.shuffled is not None and self.notes.get("shuffle") is not None:
            set_shuffling_epoch(self.shuffled, self.notes["shuffle"])


class Save(keras.callbacks.Callback):
    """The stand-in for a user's `BackupAndRestore` that saves backups.

    It runs last, so that decisions of other callbacks are saved too. `others`
    are not told of batches that are skipped.
    """

    def __init__(
        self,
        callback: Any,
        restore: Restore,
        others: Sequence[Any],
        workers: Workers,
        backend: Backend,
    ) -> None:
        super().__init__()
        self._is_chief = workers.cluster.is_chief
        self._backend = backend
        self._restore = restore
        self._others = others
        self._paths = Paths(callback.backup_dir)
        self._keeps_previous = callback.double_checkpoint
        self._deletes = callback.delete_checkpoint
        self._every_epoch = callback.save_freq == "epoch"
        # `save_freq=False` becomes 0, which saves no step, as in Keras.
        self._steps = 0 if self._every_epoch else int(callback.save_freq)
        self._epoch = self._seen = self._since = 0
        self._begin = ""
        self._skipping: Skipping | None = None
        self._lacks_metrics = False

    def on_train_begin(self, logs: Any = None) -> None:
        notes = self._restore.notes
        self._since = 0
        if notes.get("step"):
            told = [*self._others, self]
            self._skipping = Skipping(
                self.model, told, notes["step"], self._go_on
            )
        elif "random" in notes:
            set_random_state(self._backend, notes["random"])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._seen = epoch, 0
        if self._skipping is not None:
            notes = self._restore.notes
            self._seen = notes["step"]
            set_random_state(self._backend, notes["begin"])
            self._lacks_metrics = not state_file.set_metric_values(
                self.model, notes["metrics"]
            )
            # Callbacks have now begun this epoch twice: undo their second
            # change.
            rates = learning_rates(self.model)
            for rate, value in zip(rates, notes["rates"], strict=True):
                rate.assign(value)
        if self._steps:
            self._begin = random_state(self._backend)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._steps:
            return
        self._since += batch + 1 - self._seen
        self._seen = batch + 1
        if self._since >= self._steps:
            self._since = 0
            self._save(self._epoch, self._seen)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.close()
        if self._every_epoch:
            self._save(epoch + 1, 0)

    def on_train_end(self, logs: Any = None) -> None:
        if self._is_chief and self._deletes:
            self._restore.remove_parts()
            self._paths.remove()
            # A folder in which the user has files stays.
            with contextlib.suppress(OSError):
                os.rmdir(self._paths.folder)

    def close(self) -> None:
        """Stops skipping, when it is done or when training ends in any way."""
        if self._skipping is not None:
            self._skipping.end()
            self._skipping = None

    def _go_on(self, batch: Any) -> None:
        """Restores random states where training goes on after skipped steps."""
        notes = self._restore.notes
        if self._lacks_metrics and batch is not None:
            # On TensorFlow, metrics are built by the first step otherwise.
            build_from(self.model, batch)
            state_file.set_metric_values(self.model, notes["metrics"])
        set_state_of_steps(self._backend, notes["random"])

    def _save(self, epoch: int, step: int) -> None:
        # On every worker: on JAX, reading `model` writes its state back.
        model = self.model
        parts = self._restore.parts
        if parts is not None:
            # Each worker reads, because what it reads may be in parts.
            parts.save(model, self._notes(epoch, step))
            if self._is_chief:
                self._paths.remove()
            return
        built = built_for(model)
        with readable_by_chief(model):
            if self._is_chief:
                self._write(model, epoch, step, built)

    def _write(
        self, model: keras.Model, epoch: int, step: int, built: Built
    ) -> None:
        self._paths.make(self._keeps_previous)
        notes = self._notes(epoch, step)
        state_file.write_state(model, self._paths.latest, notes, built)
        self._paths.write_for_keras(epoch, step)
        self._restore.remove_parts()

    def _notes(self, epoch: int, step: int) -> dict[str, Any]:
        """Returns what a backup says beside the values of variables."""
        model = self.model
        shuffled = self._restore.shuffled
        return {
            "epoch": epoch,
            "step": step,
            "shuffle": None if shuffled is None else shuffling_epoch(shuffled),
            "random": random_state(self._backend),
            "begin": self._begin,
            "metrics": state_file.metric_values(model) if step else [],
            "rates": [float(rate) for rate in learning_rates(model)],
        }


class Paths:
    """The file names of a `BackupAndRestore`, which are Keras' own."""

    def __init__(self, folder: Any) -> None:
        self.folder = os.fspath(folder)
        self.latest = os.path.join(self.folder, "latest.weights.h5")
        self._previous = f"{self.latest}.bkp"
        self._metadata = os.path.join(self.folder, "training_metadata.json")
        self._files = [
            *(self.latest, self._previous),
            *(self._metadata, f"{self._metadata}.bkp"),  # of Keras' own
        ]

    def make(self, keeps_previous: bool) -> None:
        """Makes the folder, and keeps a copy of the latest file if asked to."""
        os.makedirs(self.folder, exist_ok=True)
        if keeps_previous and state_file.is_readable(self.latest):
            with written_beside(self._previous) as beside:
                shutil.copyfile(self.latest, beside)

    @contextlib.contextmanager
    def readable(self) -> Iterator[str]:
        """Yields the latest file, or the previous one if that can't be read."""
        has_previous = os.path.exists(self._previous)
        if not has_previous or state_file.is_readable(self.latest):
            yield self.latest
            return
        # Keras chooses the format by the suffix, which the file lacks.
        with tempfile.TemporaryDirectory(prefix="keras-dist-") as folder:
            path = os.path.join(folder, os.path.basename(self.latest))
            os.symlink(os.path.abspath(self._previous), path)
            yield path

    def write_for_keras(self, epoch: int, step: int) -> None:
        with written_beside(self._metadata) as beside, open(beside, "w") as f:
            json.dump({"epoch": epoch, "batch": step}, f)

    def remove(self) -> None:
        """Removes the files, and no others."""
        for path in self._files:
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)

    def epoch_of_keras(self) -> int:
        if not os.path.exists(self._metadata):
            return 0
        with open(self._metadata) as file:
            return int(json.load(file)["epoch"])


class Skipping:
    """A stand-in for a train function that reads the first steps' data only.

    `then` is called before further data is read, with the last batch, or with
    `None` if the trainer reads batches itself.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: Sequence[Any],
        steps: int,
        then: Callable[[Any], None],
    ) -> None:
        self._model = model
        self._steps = self._left = steps
        self._then = then
        self._original = model.train_function
        self._before = [
            (callback, name, vars(callback).get(name, _ABSENT))
            for callback in callbacks
            for name in _METHODS
        ]
        model.train_function = self._train
        for callback, name, _ in self._before:
            setattr(callback, name, self._unless_skipped(callback, name))

    def end(self) -> None:
        """Restores the model and its callbacks; further calls do nothing."""
        for callback, name, before in self._before:
            if before is _ABSENT:
                delattr(callback, name)
            else:
                setattr(callback, name, before)
        self._before = []
        if self._model.train_function == self._train:
            self._model.train_function = self._original

    def _unless_skipped(self, callback: Any, name: str) -> Callable[..., None]:
        original = getattr(callback, name)

        def method(batch: int, logs: Any = None) -> None:
            if batch >= self._steps:
                original(batch, logs=logs)

        return method

    def _train(self, *args: Any) -> Any:
        """Stands in for the train function of any backend's trainer.

        The last argument is a batch or an iterator, those before it are state.
        """
        if self._left <= 0:
            self.end()
            return self._original(*args)
        executions = self._model.steps_per_execution
        self._left -= executions
        *state, data = args
        batch = None
        if hasattr(data, "__next__"):
            batch = read_execution(data, executions)
        if self._left <= 0:
            self._then(batch)
        return ({}, *state) if state else {}
