"""A model's training state, saved and restored in parts by all workers."""

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
from keras_dist.fit.workers.together import check_alike
from keras_dist.internals import keras_saveables
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.executor import Executor
from keras_dist.plugin.powers import SavesParts
from keras_dist.plugin.powers import Writing
from keras_dist.plugin.workers import raise_explained

_BACKEND, _VARIABLES, _NOTES = "backend", "variables", "notes"
_BUILT = "optimizers"
_MODEL = "model"
_WRITE = "write its parts of a checkpoint"


class TrainingState:
    """The state of a model, who keeps it, and where it is saved."""

    def __init__(self, model: keras.Model, path: Any) -> None:
        if not isinstance(model, keras.Model):
            raise TypeError(
                "A checkpoint in parts is one of a model. Received: "
                f"{model!r}. Expected: a `keras.Model`, then a path."
            )
        saving.wait()
        self._model = model
        self._power = _power()
        strategy = strategy_of(model)
        self._executor: Executor | None = getattr(strategy, "executor", None)
        self._workers = getattr(self._executor, "workers", None)
        self._folder = CheckpointFolder(path, self._workers)
        if not model.built:
            raise ValueError(
                "Only a model with variables can be saved and restored. "
                f"Received: model '{model.name}', which is not built. Build "
                "it with `model.build(input_shape)`, or call it on a batch."
            )
        if self._workers is not None:
            self._workers.barrier("save_sharded or restore_sharded")

    def save(
        self, notes: Mapping[str, Any] | None = None, wait: bool = True
    ) -> Future[None]:
        """Saves the state, with the chief's JSON notes.

        Without `wait`, a thread writes what this copies."""
        build_optimizer(self._model)
        groups = self._groups_alike()
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
                self._power.save_parts(
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
            _NOTES: dict(notes or {}),
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

    def restore(self) -> dict[str, Any]:
        """Restores the state, and returns the notes."""
        self._groups_alike()
        notes: dict[str, Any] = self._folder.read(self._read)[_NOTES]
        return notes

    def _read(self, index: dict[str, Any], parts: str) -> None:
        """Restores the state that an index describes."""
        backend, theirs = keras.backend.backend(), index[_BACKEND]
        if theirs != backend:
            raise ValueError(
                "A checkpoint in parts is for the backend that saved it. "
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
            self._power.restore_parts(self._model, self._executor, named, parts)

    def _groups_alike(self) -> Groups:
        """Returns the variables in groups, which workers have compared."""
        groups = _groups(self._model)
        if self._workers is not None:
            every = [v for group in groups.values() for v in group]
            check_alike(every, self._workers)
        return groups

    def _layers_saved(self, saved: list[Described]) -> list[keras.Variable]:
        """Returns the layers' variables in the order of a checkpoint."""
        named, failure = {}, None
        try:
            own = {_MODEL: _groups(self._model)[_MODEL]}
            named = matched(own, {_MODEL: saved})
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


def _power() -> SavesParts:
    backend = get_backend()
    if not isinstance(backend, SavesParts):
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
        own = {id(v): v for v in variables if id(v) not in left_out}
        left_out.update(own)
        groups[group] = list(own.values())
    return groups
