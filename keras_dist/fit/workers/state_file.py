"""The chief's file with everything that a model needs to go on training."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import BinaryIO

import keras
import numpy as np

from keras_dist.core.context import replaced
from keras_dist.errors import CheckpointError
from keras_dist.fit.workers.built import Built
from keras_dist.fit.workers.built import build_as_saved
from keras_dist.fit.workers.chief_saves import writing
from keras_dist.fit.workers.sync import take_chiefs_values
from keras_dist.fit.workers.sync import written_beside
from keras_dist.fit.workers.sync import written_by_chief
from keras_dist.internals import keras_random
from keras_dist.internals import keras_saveables
from keras_dist.internals.hooks import seen_warnings
from keras_dist.plugin.workers import Workers

_NOTES = "keras_dist"
_SEEDS = "seeds"
_BUILT = "optimizers"
_MARK = b"keras_dist sealed "
_SIZE = len(_MARK) + hashlib.sha256().digest_size
_CHUNK = 1 << 20


class StateFile:
    """A file of Keras' format, with notes, seeds and a checksum.

    With `keeps_previous`, a copy of the file before it is kept beside it.
    """

    def __init__(self, path: str, keeps_previous: bool = False) -> None:
        self._path = path
        self._previous = f"{path}.bkp"
        self._keeps_previous = keeps_previous

    def exists(self) -> bool:
        return os.path.exists(self._path) or os.path.exists(self._previous)

    def write(
        self, model: keras.Model, notes: Mapping[str, Any], built: Built
    ) -> None:
        """Replaces the file, atomically; the chief alone calls it."""
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        if self._keeps_previous and _is_readable(self._path):
            with written_beside(self._previous) as beside:
                shutil.copyfile(self._path, beside)
        seeds = [listed(seed) for seed in _seeds(model)]
        text = json.dumps({**notes, _SEEDS: seeds, _BUILT: built})
        with written_beside(self._path) as beside:
            with writing():
                type(model).save_weights(model, beside, overwrite=True)
            with _opened(beside, "a") as file:
                file[_NOTES] = np.frombuffer(text.encode(), "uint8")
            _seal(beside)

    def restore(
        self, model: keras.Model, workers: Workers | None
    ) -> dict[str, Any] | None:
        """Restores a model on every worker; only the chief needs the file.

        Returns the notes, empty for a file of Keras', or `None` without a file.
        """
        is_chief = workers is None or workers.cluster.is_chief
        with self._readable() if is_chief else contextlib.nullcontext("") as p:
            return _restored(model, p, workers)

    def remove(self) -> None:
        for path in (self._path, self._previous):
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)

    @contextlib.contextmanager
    def _readable(self) -> Iterator[str]:
        """Yields the file, or the previous one if it can't be read."""
        has_previous = os.path.exists(self._previous)
        if not has_previous or _is_readable(self._path):
            yield self._path
            return
        # Keras chooses the format by the suffix, which the file lacks.
        with tempfile.TemporaryDirectory(prefix="keras-dist-") as folder:
            path = os.path.join(folder, os.path.basename(self._path))
            os.symlink(os.path.abspath(self._previous), path)
            yield path


def _restored(
    model: keras.Model, path: str, workers: Workers | None
) -> dict[str, Any] | None:
    """Restores a model from a file, whose path is empty but on the chief."""
    exists = os.path.exists(path)
    if exists and _is_damaged(path):
        raise CheckpointError(
            f"The saved state '{path}' is damaged: its checksum does not "
            "match its content. Delete the file, or replace it with an "
            "intact copy. `BackupAndRestore(..., double_checkpoint=True)` "
            "also keeps the previous state, and continues from that one."
        )
    text = json.dumps(_read_notes(path) if exists else None)
    if workers is not None:
        text = workers.chiefs_text(text)
    notes: dict[str, Any] | None = json.loads(text)
    if notes is None:
        return None
    variables = keras_saveables.layer_variables(model)
    build_as_saved(model, notes.pop(_BUILT, None), variables)
    with written_by_chief(model):
        if path:
            _load(model, path)
    if workers is not None:
        take_chiefs_values(keras_saveables.all_variables(model), workers)
    assign_if_alike(_seeds(model), notes.pop(_SEEDS, []))
    return notes


def listed(variable: keras.Variable) -> Any:
    """Returns a variable's value as a list of numbers."""
    return keras.ops.convert_to_numpy(variable.value).tolist()


def assign_if_alike(variables: list[keras.Variable], values: list[Any]) -> bool:
    """Assigns lists of numbers, if there is one for each variable."""
    if len(variables) != len(values):
        return False
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return True


def _is_readable(path: str) -> bool:
    """Returns whether a file, of Keras or ours, exists and is undamaged."""
    try:
        with _opened(path, "r"):
            return not _is_damaged(path)
    except OSError:
        return False


def _opened(path: str, mode: str) -> Any:
    import h5py  # type: ignore[import-untyped]  # Keras loads it late too

    return h5py.File(path, mode)


def _read_notes(path: str) -> dict[str, Any]:
    with _opened(path, "r") as file:
        if _NOTES not in file:
            return {}
        notes: dict[str, Any] = json.loads(bytes(file[_NOTES][:]))
        return notes


class _LossError(Exception):
    """A loss that Keras only warns of."""


class _Loading(threading.local):
    def __init__(self) -> None:
        self.is_strict = False


_loading = _Loading()


def _load(model: keras.Model, path: str) -> None:
    """Loads a file of Keras', and raises where Keras only warns of a loss."""
    try:
        with replaced(_loading, is_strict=True):
            type(model).load_weights(model, path)
    except _LossError as loss:
        raise ValueError(
            f"The saved state '{path}' lacks a part of model "
            f"'{model.name}'. Received: {loss} Expected: the state of "
            "the same model and optimizers."
        ) from None


def _see(text: str) -> bool:
    if _loading.is_strict and text.startswith("Skipping "):
        raise _LossError(text)
    return False


# Stands for `warnings` in the modules by which Keras loads a file.
hook_warnings = seen_warnings(_see)


def _seeds(model: keras.Model) -> list[keras.Variable]:
    return [v for v in model.variables if keras_random.is_seed(v)]


def _seal(path: str) -> None:
    """Adds a checksum to the end of a local file, which HDF5 does not read."""
    with open(path, "r+b") as file:
        digest = _digest(file, os.path.getsize(path))
        file.seek(0, os.SEEK_END)
        file.write(_MARK + digest)


def _is_damaged(path: str) -> bool:
    """Returns whether a local file's content differs from its checksum."""
    size = os.path.getsize(path) - _SIZE
    if size < 0:
        return False
    with open(path, "rb") as file:
        digest = _digest(file, size)
        end = file.read()
    return end.startswith(_MARK) and end != _MARK + digest


def _digest(file: BinaryIO, size: int) -> bytes:
    checksum = hashlib.sha256()
    while data := file.read(min(size, _CHUNK)):
        checksum.update(data)
        size -= len(data)
    return checksum.digest()
