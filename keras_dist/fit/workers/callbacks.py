"""Callbacks on several workers: those that write run on the chief only."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras

from keras_dist.errors import ClusterError
from keras_dist.plugin.chief_only import chief_only

# `keras_dist.fit.workers.backup` replaces it on every worker.
BACKUP = keras.callbacks.BackupAndRestore
_SAVER = keras.callbacks.ModelCheckpoint
_WRITERS = (
    keras.callbacks.CSVLogger,
    _SAVER,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
_TALKERS = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
)
_CHANGERS = (
    BACKUP,
    keras.callbacks.EarlyStopping,
    keras.callbacks.SwapEMAWeights,
)
# Those of Keras' that change the model, which all workers need.
_CHANGING = (*_CHANGERS, *_TALKERS, keras.callbacks.TerminateOnNaN)
# Writers of other packages, known by name: the packages are not imported.
_WRITERS_ELSEWHERE = {
    "wandb": ("WandbMetricsLogger", "WandbModelCheckpoint"),
}
_MARK = "_keras_dist_on_chief"
_HOOKS = [
    "set_model",
    *(name for name in dir(keras.callbacks.Callback) if name[:3] == "on_"),
]
_Callback = TypeVar("_Callback", bound=keras.callbacks.Callback)


def on_chief(callback: _Callback) -> _Callback:
    """Marks a callback that runs on the chief only, such as one that writes.

    On several workers, `fit`, `evaluate` and `predict` run callbacks on every
    worker, except those that write: `CSVLogger`, `ModelCheckpoint`,
    `RemoteMonitor` and `TensorBoard` of Keras, `WandbMetricsLogger` and
    `WandbModelCheckpoint` of Weights & Biases, and their subclasses. These run
    on the chief only. keras_dist doesn't know other callbacks that write. Mark
    them, or each worker writes the same.

    A marked callback may read `logs` and variables, write files and call
    `model.save`. Its decision to stop training counts for all workers. It must
    not change variables: other workers would keep their values. What needs all
    workers raises an error in it. Examples are `model.predict`, and sharded
    variables.

    Some callbacks can't be made on other workers. Then pass them on the chief
    only: `[Logger()] if strategy.extended.should_checkpoint else []`.

    Args:
        callback: A `keras.callbacks.Callback`. With one worker, the mark has
            no effect.

    Returns:
        The same callback.

    Raises:
        TypeError: If `callback` is something else.
        ValueError: If `callback` changes the model on every worker. Examples
            are `BackupAndRestore` and `EarlyStopping`.

    Example:

    >>> class Log(keras.callbacks.Callback):
    ...     def on_epoch_end(self, epoch, logs=None):
    ...         print(f"epoch {epoch} is over")
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(
    ...     np.ones((4, 2)), np.ones((4, 1)), verbose=0,
    ...     callbacks=[keras_dist.on_chief(Log())])
    epoch 0 is over
    """
    if not isinstance(callback, keras.callbacks.Callback):
        raise TypeError(
            "`on_chief` takes a `keras.callbacks.Callback`. Received: "
            f"{callback!r} of type {type(callback).__name__}. Mark each "
            "callback of a list, and not its class."
        )
    if isinstance(callback, _CHANGERS):
        raise ValueError(
            f"{type(callback).__name__} changes the model, which all workers "
            f"have to do together.\nReceived: on_chief({callback!r}). "
            "Expected: a callback that reads `logs` and writes. Pass this one "
            "without `on_chief`. It writes on the chief only."
        )
    setattr(callback, _MARK, True)
    return callback


def flat_callbacks(callbacks: object) -> list[Any]:
    """Returns the given callbacks as a list: none, one, or a nest of them."""
    flat = keras.tree.flatten(callbacks) if callbacks else []
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", ())
    for callback in flat:
        if isinstance(callback, orbax):
            raise ClusterError(
                "OrbaxCheckpoint can't be used on several workers, because "
                f"every worker would write. Received: {callback!r}. Expected: "
                "keras.callbacks.BackupAndRestore or ModelCheckpoint."
            )
    return flat


def quiet_callbacks(
    callbacks: Sequence[Any], keeps_shards: bool = False
) -> list[Any]:
    """Returns the callbacks that run on a worker that is not the chief.

    Those that write are left out, those that print become quiet. With
    `keeps_shards`, saving takes all workers, so that savers stay.
    """
    kept = []
    for callback in callbacks:
        if keeps_shards and isinstance(callback, _SAVER):
            callback = _only_saving(callback)
        elif _is_on_chief(callback):
            continue
        if isinstance(callback, (*_TALKERS, _SAVER)):
            callback.verbose = 0
        kept.append(callback)
    return kept


@contextlib.contextmanager
def chiefs_guarded(
    callbacks: Sequence[Any], keeps_shards: bool
) -> Iterator[None]:
    """Has callbacks that only the chief runs raise where they would hang."""
    hooked = []
    for callback in filter(_is_on_chief, callbacks):
        saves = keeps_shards and isinstance(callback, _SAVER)
        for name in _HOOKS:
            method = getattr(callback, name, None)
            attributes = vars(callback)
            # `evaluate` in `fit` passes callbacks that are guarded already.
            if method is None or _is_default(method) or name in attributes:
                continue
            attributes[name] = _guarded(method, type(callback).__name__, saves)
            hooked.append((attributes, name))
    try:
        yield
    finally:
        for attributes, name in hooked:
            del attributes[name]


def _guarded(
    method: Callable[..., Any], name: str, saves: bool
) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with chief_only(f"the callback {name}", saves):
            return method(*args, **kwargs)

    return guarded


def _is_default(method: Callable[..., Any]) -> bool:
    function = getattr(method, "__func__", None)
    return function in vars(keras.callbacks.Callback).values()


def is_everyones(callback: object) -> bool:
    """Tells whether all workers need a callback, since it changes the model."""
    return isinstance(callback, _CHANGING) and not _is_on_chief(callback)


def _is_on_chief(callback: object) -> bool:
    return (
        isinstance(callback, _WRITERS)
        or _MARK in vars(callback)
        or _is_from_elsewhere(callback)
    )


def _is_from_elsewhere(callback: object) -> bool:
    """Tells whether a class of another package's writers is a base."""
    return any(
        cls.__name__
        in _WRITERS_ELSEWHERE.get(cls.__module__.partition(".")[0], ())
        for cls in type(callback).__mro__
    )


def _only_saving(callback: object) -> Any:
    """Returns a callback that saves when this one does, and nothing else."""
    if _MARK not in vars(callback) and not _is_from_elsewhere(callback):
        return callback
    # It makes no file, since it runs on a worker that is not the chief.
    saver = _SAVER.__new__(_SAVER)
    vars(saver).update(vars(callback))
    vars(saver).pop(_MARK, None)
    return saver
