"""A file with everything that a model needs to go on training exactly."""

import hashlib
import json
import os
import threading
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
from keras_dist.fit.workers.together import take_chiefs_values
from keras_dist.fit.workers.together import written_beside
from keras_dist.fit.workers.together import written_by_chief
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


def write_state(
    model: keras.Model, path: str, notes: Mapping[str, Any], built: Built
) -> None:
    """Writes weights, optimizer state, seeds and JSON notes, atomically.

    All workers ask `built_for`, which may refuse the model; the chief writes.
    """
    seeds = [_listed(seed) for seed in _seeds(model)]
    text = json.dumps({**notes, _SEEDS: seeds, _BUILT: built})
    with written_beside(path) as beside:
        with writing():
            type(model).save_weights(model, beside, overwrite=True)
        with _opened(beside, "a") as file:
            file[_NOTES] = np.frombuffer(text.encode(), "uint8")
        seal(beside)


def restore_state(
    model: keras.Model, path: str, workers: Workers | None
) -> dict[str, Any] | None:
    """Restores a model on every worker from the chief's file.

    Returns the notes, empty for a file of Keras', or `None` without a file.
    """
    is_chief = workers is None or workers.cluster.is_chief
    found = os.path.exists(path) if is_chief else None
    if found and is_damaged(path):
        raise CheckpointError(
            f"The saved state '{path}' is damaged: its checksum does not "
            "match its content. Delete the file, or replace it with an "
            "intact copy. `BackupAndRestore(..., double_checkpoint=True)` "
            "also keeps the previous state, and continues from that one."
        )
    text = json.dumps(_read_notes(path) if found else None)
    if workers is not None:
        text = workers.chiefs_text(text)
    notes: dict[str, Any] | None = json.loads(text)
    if notes is None:
        return None
    variables = keras_saveables.layer_variables(model)
    build_as_saved(model, notes.pop(_BUILT, None), variables)
    with written_by_chief(model):
        if is_chief:
            _load(model, path)
    if workers is not None:
        take_chiefs_values(keras_saveables.all_variables(model), workers)
    seeds = notes.pop(_SEEDS, [])
    if len(seeds) == len(_seeds(model)):
        for variable, value in zip(_seeds(model), seeds, strict=True):
            variable.assign(value)
    return notes


def is_readable(path: str) -> bool:
    """Returns whether a file, of Keras or ours, exists and is undamaged."""
    try:
        with _opened(path, "r"):
            return not is_damaged(path)
    except OSError:
        return False


def metric_values(model: keras.Model) -> list[Any]:
    """Returns the states of a model's metrics, as lists of numbers."""
    own = keras_saveables.metric_variables(model).values()
    return [_listed(variable) for variable in own]


def set_metric_values(model: keras.Model, values: list[Any]) -> bool:
    """Restores the values from `metric_values`, if the metrics are built."""
    variables = keras_saveables.metric_variables(model).values()
    if len(variables) != len(values):
        return False
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return True


def _opened(path: str, mode: str) -> Any:
    import h5py  # type: ignore[import-untyped]  # Keras loads it late too

    return h5py.File(path, mode)


def _read_notes(path: str) -> dict[str, Any]:
    with _opened(path, "r") as file:
        if _NOTES not in file:
            return {}
        notes: dict[str, Any] = json.loads(bytes(file[_NOTES][:]))
        return notes


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


class _LossError(Exception):
    """A loss that Keras only warns of."""


class _Loading(threading.local):
    def __init__(self) -> None:
        self.is_strict = False


_loading = _Loading()


def _see(text: str) -> bool:
    if _loading.is_strict and text.startswith("Skipping "):
        raise _LossError(text)
    return False


# Stands for `warnings` in the modules by which Keras loads a file.
hook_warnings = seen_warnings(_see)


def _seeds(model: keras.Model) -> list[keras.Variable]:
    return [v for v in model.variables if keras_random.is_seed(v)]


def _listed(variable: keras.Variable) -> Any:
    return keras.ops.convert_to_numpy(variable.value).tolist()


def seal(path: str) -> None:
    """Adds a checksum to the end of a local file, which HDF5 does not read."""
    with open(path, "r+b") as file:
        digest = _digest(file, os.path.getsize(path))
        file.seek(0, os.SEEK_END)
        file.write(_MARK + digest)


def is_damaged(path: str) -> bool:
    """Returns whether a local file's content differs from its checksum."""
    size = os.path.getsize(path) - _SIZE
    if size < 0:
        return False
    with open(path, "rb") as file:
        digest = _digest(file, size)
        end = file.read()
    return end.startswith(_MARK) and end != _MARK + digest


def _digest(file: BinaryIO, size: int) -> bytes:
    found = hashlib.sha256()
    while size > 0:
        data = file.read(min(size, _CHUNK))
        if not data:
            break
        found.update(data)
        size -= len(data)
    return found.digest()
