"""`keras.callbacks.BackupAndRestore` on several workers.

All go on from the backup at the same step, with the same weights, seeds and
random states, so that data is shuffled as without a stop.
"""

import contextlib
import json
import os
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.fit.workers.state_file import assign_if_alike
from keras_dist.fit.workers.state_file import listed
from keras_dist.fit.workers.sync import learning_rates
from keras_dist.fit.workers.sync import written_beside
from keras_dist.fit.workers.training_state import TrainingState
from keras_dist.internals.keras_data import read_execution
from keras_dist.internals.keras_data import set_initial_epoch
from keras_dist.internals.keras_data import set_shuffling_epoch
from keras_dist.internals.keras_data import shuffling_epoch
from keras_dist.internals.keras_internals import build_from
from keras_dist.internals.keras_saveables import metric_variables
from keras_dist.plugin.backend import Backend
from keras_dist.plugin.randomness import random_state
from keras_dist.plugin.randomness import set_random_state
from keras_dist.plugin.randomness import set_state_of_steps
from keras_dist.plugin.workers import Workers

_METHODS = ("on_train_batch_begin", "on_train_batch_end")
_ABSENT = object()


def refuse_shards(model: keras.Model, callbacks: object) -> None:
    """Refuses Keras' own `BackupAndRestore` where workers saved in parts.

    It would not find their backup, and begin again.
    """
    given = getattr(callbacks, "callbacks", callbacks)
    for callback in keras.tree.flatten(given) if given else []:
        if not isinstance(callback, keras.callbacks.BackupAndRestore):
            continue
        path = callback.backup_dir
        if TrainingState(model, path).exists_sharded():
            raise ValueError(
                "Only workers of MultiWorkerMirroredStrategy continue from a "
                "backup of sharded variables by themselves. Received: "
                f"BackupAndRestore('{path}'), where workers have saved. "
                f"Expected: `keras_dist.restore_sharded(model, '{path}')`, and "
                "`fit` with another folder and with `initial_epoch`."
            )


class Restore(keras.callbacks.Callback):
    """The stand-in for a user's `BackupAndRestore` that restores a backup."""

    def __init__(self, callback: Any, workers: Workers) -> None:
        super().__init__()
        self._workers = workers
        self._keeps_previous = callback.double_checkpoint
        self._folder = os.fspath(callback.backup_dir)
        # What Keras' own callback reads.
        self._metadata = os.path.join(self._folder, "training_metadata.json")
        self._latest = os.path.join(self._folder, "latest.weights.h5")
        # Notes of the restored backup, such as its epoch and step.
        self.notes: dict[str, Any] = {}
        # The iterator of `fit`, if it shuffles its data.
        self.shuffled: Any = None

    def note_shuffled(self, iterator: object) -> None:
        """Notes the iterator that `fit` has made of its data."""
        self.shuffled = iterator

    def on_train_begin(self, logs: object = None) -> None:
        self._state = TrainingState(
            self.model,
            self._folder,
            self._latest,
            self._workers,
            self._keeps_previous,
        )
        notes = self._state.restore()
        if notes is not None and "epoch" not in notes:
            notes = {"epoch": self._epoch_of_keras(), "step": 0}
        self.notes = notes or {}
        if self.notes:
            set_initial_epoch(self.model, self.notes["epoch"])
        # `None` in a backup of an older Keras; absent in one of Keras' own.
        if self.shuffled is not None and self.notes.get("shuffle") is not None:
            set_shuffling_epoch(self.shuffled, self.notes["shuffle"])

    def save(self, notes: dict[str, Any]) -> None:
        """Saves a backup, with the notes of the chief."""
        self._state.save(notes)
        if not self._workers.cluster.is_chief:
            return
        if os.path.exists(self._latest):
            metadata = {"epoch": notes["epoch"], "batch": notes["step"]}
            with written_beside(self._metadata) as path, open(path, "w") as f:
                json.dump(metadata, f)
        else:
            self._remove_metadata()

    def remove(self) -> None:
        """Removes the backup; a folder in which the user has files stays."""
        if self._workers.cluster.is_chief:
            self._state.remove()
            self._remove_metadata()
            with contextlib.suppress(OSError):
                os.rmdir(self._folder)

    def _remove_metadata(self) -> None:
        for path in (self._metadata, f"{self._metadata}.bkp"):  # of Keras' own
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)

    def _epoch_of_keras(self) -> int:
        with contextlib.suppress(FileNotFoundError), open(self._metadata) as f:
            return int(json.load(f)["epoch"])
        return 0


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
        backend: Backend,
    ) -> None:
        super().__init__()
        self._backend = backend
        self._restore = restore
        self._others = others
        self._deletes = callback.delete_checkpoint
        self._every_epoch = callback.save_freq == "epoch"
        # `save_freq=False` becomes 0, which saves no step, as in Keras.
        self._steps = 0 if self._every_epoch else int(callback.save_freq)
        self._epoch = self._seen = self._since = 0
        self._begin = ""
        self._skipping: Skipping | None = None
        self._lacks_metrics = False

    def on_train_begin(self, logs: object = None) -> None:
        notes = self._restore.notes
        self._since = 0
        if notes.get("step"):
            callbacks = [*self._others, self]
            self._skipping = Skipping(
                self.model, callbacks, notes["step"], self._go_on
            )
        elif "random" in notes:
            set_random_state(self._backend, notes["random"])

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._epoch, self._seen = epoch, 0
        if self._skipping is not None:
            notes = self._restore.notes
            self._seen = notes["step"]
            set_random_state(self._backend, notes["begin"])
            self._lacks_metrics = not self._set_metrics()
            # Callbacks have now begun this epoch twice: undo their second
            # change.
            rates = learning_rates(self.model)
            for rate, value in zip(rates, notes["rates"], strict=True):
                rate.assign(value)
        if self._steps:
            self._begin = random_state(self._backend)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if not self._steps:
            return
        self._since += batch + 1 - self._seen
        self._seen = batch + 1
        if self._since >= self._steps:
            self._since = 0
            self._save(self._epoch, self._seen)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.close()
        if self._every_epoch:
            self._save(epoch + 1, 0)

    def on_train_end(self, logs: object = None) -> None:
        if self._deletes:
            self._restore.remove()

    def close(self) -> None:
        """Stops skipping, when it is done or when training ends in any way."""
        if self._skipping is not None:
            self._skipping.end()
            self._skipping = None

    def _go_on(self, batch: object) -> None:
        """Restores random states where training goes on after skipped steps."""
        notes = self._restore.notes
        if self._lacks_metrics and batch is not None:
            # On TensorFlow, metrics are built by the first step otherwise.
            build_from(self.model, batch)
            self._set_metrics()
        set_state_of_steps(self._backend, notes["random"])

    def _set_metrics(self) -> bool:
        """Restores the values of metrics, if these are built."""
        variables = metric_variables(self.model).values()
        return assign_if_alike([*variables], self._restore.notes["metrics"])

    def _save(self, epoch: int, step: int) -> None:
        """Saves what a backup says, and the values of variables."""
        # On every worker: on JAX, reading `model` writes its state back.
        model = self.model
        shuffled = self._restore.shuffled
        metrics = metric_variables(model).values() if step else []
        notes = {
            "epoch": epoch,
            "step": step,
            "shuffle": None if shuffled is None else shuffling_epoch(shuffled),
            "random": random_state(self._backend),
            "begin": self._begin,
            "metrics": [listed(variable) for variable in metrics],
            "rates": [float(rate) for rate in learning_rates(model)],
        }
        self._restore.save(notes)


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

    def _unless_skipped(
        self, callback: object, name: str
    ) -> Callable[..., None]:
        original = getattr(callback, name)

        def method(batch: int, logs: object = None) -> None:
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
