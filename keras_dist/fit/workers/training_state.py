"""A model's training state: saved by the chief, or in parts by all workers."""

import contextlib
import os
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import keras

from keras_dist.errors import CheckpointError
from keras_dist.errors import KerasDistError
from keras_dist.errors import UnsupportedBackendError
from keras_dist.errors import UnsupportedModelError
from keras_dist.fit.plain_models import strategy_of
from keras_dist.fit.workers import saving
from keras_dist.fit.workers.built import build_as_saved
from keras_dist.fit.workers.built import build_optimizer
from keras_dist.fit.workers.built import built_for
from keras_dist.fit.workers.checkpoint_folder import CheckpointFolder
from keras_dist.fit.workers.matching import Described
from keras_dist.fit.workers.matching import Groups
from keras_dist.fit.workers.matching import described
from keras_dist.fit.workers.matching import key
from keras_dist.fit.workers.matching import matched
from keras_dist.fit.workers.state_file import StateFile
from keras_dist.fit.workers.sync import check_alike
from keras_dist.fit.workers.sync import readable_by_chief
from keras_dist.internals import keras_saveables
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.capabilities import SavesShards
from keras_dist.plugin.capabilities import Writing
from keras_dist.plugin.executor import Executor
from keras_dist.plugin.workers import Workers
from keras_dist.plugin.workers import raise_explained

_BACKEND, _VARIABLES, _NOTES = "backend", "variables", "notes"
_BUILT = "optimizers"
_MODEL = "model"
_WRITE = "write its parts of a checkpoint"
# Seconds within which a worker sees a shared folder, before the chief saves
# for all.
_PATIENCE = 2.0


class TrainingState:
    """The training state of a model, and where it is saved.

    It is saved in parts, into a folder that all workers share, or by the chief
    as one file of Keras' format. All workers call the methods together.

    Args:
        model: The `keras.Model`.
        folder: The folder for parts.
        file: The path of the chief's file. Then parts are for several workers
            with sharded variables and a shared folder. Without a file, the
            state is always in parts.
        workers: The workers, unless they are those of the model's strategy.
        keeps_previous: Whether the file from before is kept, too.
    """

    def __init__(
        self,
        model: keras.Model,
        folder: object,
        file: str | None = None,
        workers: Workers | None = None,
        keeps_previous: bool = False,
    ) -> None:
        strategy = strategy_of(model)
        self._model = model
        self._executor: Executor | None = getattr(strategy, "executor", None)
        self._workers = workers or getattr(self._executor, "workers", None)
        self._folder = CheckpointFolder(folder, self._workers)
        self._file: StateFile | None = None
        if file is not None:
            self._file = StateFile(file, keeps_previous)
        plan = getattr(strategy, "plan", None)
        self._may_be_sharded = (
            self._workers is not None
            and plan is not None
            and plan.shards_variables
        )
        # Whether parts are written: `None` until workers have found out.
        self._is_sharded: bool | None = file is None or None

    def exists_sharded(self) -> bool:
        """Returns whether the chief has a whole sharded checkpoint."""
        return self._folder.exists()

    def save(
        self, notes: Mapping[str, Any] | None = None, wait: bool = True
    ) -> Future[None]:
        """Saves the state, with the chief's JSON notes.

        Without `wait`, a thread writes the parts, which this copies."""
        self._check()
        if self._goes_sharded():
            saved = self._save_shards(notes or {}, wait)
            if self._file is not None and self._folder.is_chief:
                self._file.remove()
            return saved
        built = built_for(self._model)

        def write() -> None:
            if self._file is not None and self._folder.is_chief:
                self._file.write(self._model, notes or {}, built)
                self._folder.remove()

        with readable_by_chief(self._model):
            return saving.start(write, wait=True)

    def restore(self) -> dict[str, Any] | None:
        """Restores the state; returns the notes, `None` without a file."""
        self._check()
        notes: dict[str, Any] | None
        if self._file is None or self._folder.exists():
            self._come_together()
            notes = self._folder.read(self._read)[_NOTES]
        else:
            notes = self._file.restore(self._model, self._workers)
        # Before a worker has to end, and has no time.
        self._goes_sharded()
        return notes

    def remove(self) -> None:
        """Removes the checkpoint, on the chief; other files stay."""
        if self._folder.is_chief:
            self._folder.remove()
            if self._file is not None:
                self._file.remove()

    def _check(self) -> None:
        """Refuses what can't be saved, and waits for savings under way."""
        if not isinstance(self._model, keras.Model):
            raise TypeError(
                "A checkpoint is one of a model. Received: "
                f"{self._model!r}. Expected: a `keras.Model`, then a path."
            )
        saving.wait()
        if self._file is None:
            _capability()
        if not self._model.built:
            raise ValueError(
                "Only a model with variables can be saved and restored. "
                f"Received: model '{self._model.name}', which is not built. "
                "Build it with `model.build(input_shape)`, or call it on a "
                "batch."
            )

    def _goes_sharded(self) -> bool:
        """Returns whether all workers can write parts, and share a folder."""
        if self._is_sharded is None:
            self._is_sharded = False
            if self._may_be_sharded and self._workers is not None:
                everyone = self._workers.concatenate_numbers([_can_save()])
                is_possible = all(everyone)
                self._is_sharded = is_possible and self._folder.is_shared(
                    _PATIENCE
                )
        return self._is_sharded

    def _come_together(self) -> Groups:
        """Returns the variables in groups, which workers have compared."""
        _capability()
        groups = _groups(self._model)
        if self._workers is not None:
            self._workers.barrier("save_sharded or restore_sharded")
            every = [v for group in groups.values() for v in group]
            check_alike(every, self._workers)
        return groups

    def _save_shards(
        self, notes: Mapping[str, Any], wait: bool
    ) -> Future[None]:
        build_optimizer(self._model)
        groups = self._come_together()
        built = built_for(self._model)
        parts = self._folder.make_parts()
        named = {
            key(group, position): variable
            for group, variables in groups.items()
            for position, variable in enumerate(variables)
        }
        begun: list[Writing] = []

        def begin() -> str:
            begun.append(
                _capability().save_shards(
                    self._model, self._executor, named, parts, not wait
                )
            )
            return ""

        with self._explained("written"):
            # No worker waits in a thread for one that could not begin.
            self._everyones(parts, "begin", _WRITE, begin)
        index = {
            _BACKEND: keras.backend.backend(),
            _VARIABLES: {
                group: [*map(described, variables)]
                for group, variables in groups.items()
            },
            _BUILT: built,
            _NOTES: dict(notes),
        }

        def finish() -> None:
            with self._explained("written", in_background=not wait):
                self._finish(begun[0], parts, index, in_background=not wait)

        return saving.start(finish, wait)

    def _finish(
        self,
        writing: Writing,
        parts: str,
        index: dict[str, Any],
        in_background: bool,
    ) -> None:
        """Writes the parts, and makes them the checkpoint when all have."""
        texts = self._everyones(
            parts, "write", _WRITE, writing.write, in_background
        )

        def commit() -> str:
            if self._folder.is_chief:
                writing.finish(texts)
                self._folder.commit(parts, index)
            return ""

        what = f"finish the checkpoint '{self._folder.path}'"
        self._everyones(parts, "commit", what, commit, in_background)

    def _everyones(
        self,
        parts: str,
        step: str,
        what: str,
        fn: Callable[[], str],
        in_background: bool = False,
    ) -> list[str]:
        """Returns what all workers' functions return."""
        if self._workers is None:
            return [fn()]
        # Workers may reach the folder by different paths.
        name = f"{os.path.basename(parts)}/{step}"
        texts: list[str] = self._workers.do_all(name, what, fn, in_background)
        return texts

    def _read(self, index: dict[str, Any], parts: str) -> None:
        """Restores the state that an index describes."""
        backend, theirs = keras.backend.backend(), index[_BACKEND]
        if theirs != backend:
            raise ValueError(
                "A checkpoint in parts is for the backend that saved it.\n"
                f"Received: path='{self._folder.path}', of the backend "
                f"'{theirs}'. Expected: a checkpoint of '{backend}', or "
                f"KERAS_BACKEND={theirs}. `model.save_weights` saves for all "
                "backends."
            )
        saved = index[_VARIABLES]
        build_as_saved(
            self._model, index.get(_BUILT), self._layers_saved(saved[_MODEL])
        )
        groups = _groups(self._model)
        if set(groups) == {_MODEL}:  # without an optimizer
            saved = {_MODEL: saved[_MODEL]}
        named = matched(groups, saved)
        with self._explained("read"):
            _capability().restore_shards(
                self._model, self._executor, named, parts
            )

    def _layers_saved(self, saved: list[Described]) -> list[keras.Variable]:
        """Returns the layers' variables in the order of a checkpoint."""
        named, failure = {}, None
        try:
            groups = {_MODEL: _groups(self._model)[_MODEL]}
            named = matched(groups, {_MODEL: saved})
        except ValueError as error:
            failure = error
        # No worker builds optimizers alone.
        self._folder.check_all(failure, f"restore '{self._folder.path}'")
        return [named[key(_MODEL, position)] for position in range(len(saved))]

    @contextlib.contextmanager
    def _explained(
        self, what: str, in_background: bool = False
    ) -> Iterator[None]:
        """Names the checkpoint, or a lost worker, if something fails inside."""
        try:
            yield
        except Exception as error:
            # The thread that trains finds out by itself who is lost.
            if not in_background:
                raise_explained(error, self._workers)
            if isinstance(error, KerasDistError):
                raise
            cause = f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"A checkpoint in parts could not be {what}. Received: "
                f"path='{self._folder.path}' ({cause}). Expected: a disk that "
                "is neither full nor read-only, and files that are whole."
            ) from error


def _capability() -> SavesShards:
    backend = get_backend()
    if not isinstance(backend, SavesShards):
        raise UnsupportedModelError(
            f"The backend '{keras.backend.backend()}' keeps each variable "
            "whole, and saves it whole. Received: `save_sharded` or "
            "`restore_sharded`. Expected: `model.save_weights` and "
            "`model.load_weights`, or the backend 'jax' or 'torch', chosen "
            "with KERAS_BACKEND."
        )
    backend.check_saving()
    return backend


def _groups(model: keras.Model) -> Groups:
    """Returns a model's variables but for metrics, in groups."""
    left_out = set(keras_saveables.metric_variables(model))
    groups: Groups = {_MODEL: keras_saveables.layer_variables(model)}
    for place, optimizer in keras_saveables.all_optimizers(model).items():
        groups[place] = list(optimizer.variables)
    for group, variables in groups.items():
        by_id = {id(v): v for v in variables if id(v) not in left_out}
        left_out.update(by_id)
        groups[group] = list(by_id.values())
    return groups


def _can_save() -> int:
    """Returns 1 if the backend saves parts, and has what it takes."""
    try:
        _capability()
    except (UnsupportedBackendError, UnsupportedModelError):
        return 0
    return 1
