"""Leaves progress bars and writing to the chief among several workers."""

import inspect
import os
from collections.abc import Mapping
from typing import Any

import keras

from keras_dist.errors import ClusterError
from keras_dist.fit.workers.state_file import written_beside
from keras_dist.plugin.workers import Workers

# `keras_dist.fit.workers.backup` replaces it on every worker.
BACKUP = keras.callbacks.BackupAndRestore
_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
_TALKERS = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
)
SAVING = ("save", "save_weights", "export")


def flat_callbacks(callbacks: Any) -> list[Any]:
    """Returns the given callbacks as a list: none, one, or a nest of them."""
    flat = keras.tree.flatten(callbacks) if callbacks else []
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", ())
    for callback in flat:
        if isinstance(callback, orbax):
            raise ClusterError(
                "OrbaxCheckpoint can't be used on several workers, because "
                f"each of them would write. Received: {callback!r}. Expected: "
                "keras.callbacks.BackupAndRestore or ModelCheckpoint."
            )
    return flat


def quiet_callbacks(
    callbacks: list[Any], keeps_parts: bool = False
) -> list[Any]:
    """Returns the callbacks that run on a worker that is not the chief.

    Keras' callbacks that write are left out, and so are subclasses of them.
    Those that only print stay, without printing. All other callbacks stay as
    they are, and ask `strategy.extended.should_checkpoint` themselves.

    With `keeps_parts`, saving takes all workers: callbacks that save the model
    stay too, and write nothing here.
    """
    savers = (keras.callbacks.ModelCheckpoint,) if keeps_parts else ()
    kept = [
        each
        for each in callbacks
        if isinstance(each, savers) or not isinstance(each, _WRITERS)
    ]
    talkers: Any = (*_TALKERS, *savers)
    for callback in kept:
        if isinstance(callback, talkers):
            callback.verbose = 0
    return kept


def save(
    model: keras.Model, name: str, workers: Workers, *args: Any, **kwargs: Any
) -> None:
    """Calls a model's saving method, on the chief only.

    `name` is one of `SAVING`. A single local file is complete at any time: the
    new one is written beside the old one and then replaces it.
    """
    if not workers.cluster.is_chief:
        return
    original = getattr(type(model), name)
    given = inspect.signature(original).bind(model, *args, **kwargs)
    path = _local_file(name, given.arguments)
    if path is None:
        original(*given.args, **given.kwargs)
        return
    with written_beside(path) as beside:
        given.arguments["filepath"] = beside
        original(*given.args, **given.kwargs)


def _local_file(name: str, arguments: Mapping[str, Any]) -> str | None:
    """Returns the path of a local file that is written without asking.

    `None` if there are several files, or if the user is asked.
    """
    path = arguments.get("filepath")
    if name == "export" or not isinstance(path, (str, os.PathLike)):
        return None
    text: str = os.fspath(path)
    asks = not arguments.get("overwrite", True) and os.path.exists(text)
    is_one_file = (
        text.endswith((".keras", ".h5"))
        and arguments.get("max_shard_size") is None
    )
    is_local = "://" not in text
    return text if is_one_file and is_local and not asks else None
