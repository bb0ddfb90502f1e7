"""Saving by several workers: the chief writes, and the others wait for it.

They wait if they save too, in the same line. A chief that saves alone waits for
nobody. Keras' functions, and the methods of a part of a model, do as the
methods of the model itself.
"""

import contextlib
import contextvars
import functools
import inspect
import os
import zlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_dist.fit.plain_models import strategy_of
from keras_dist.fit.workers import drift
from keras_dist.fit.workers.sync import readable_by_chief
from keras_dist.fit.workers.sync import written_beside
from keras_dist.internals.hooks import as_hook
from keras_dist.plugin.chief_only import is_chief_only
from keras_dist.plugin.chief_only import saving
from keras_dist.plugin.messages import BEGUN
from keras_dist.plugin.messages import Messages
from keras_dist.plugin.messages import could_not
from keras_dist.plugin.recorder import of_its_own
from keras_dist.plugin.recorder import place
from keras_dist.plugin.recorder import where
from keras_dist.plugin.workers import Workers

# Methods of a model that save it.
METHODS = ("save", "save_weights", "export")
# Before the digest of what the chief has saved, and in place of it.
_DONE, _FAILED = "+", "-"
# Seconds in which the chief has come to a save, unless options set them.
_PATIENCE = 600.0
_is_saving: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "keras_dist_is_saving", default=False
)


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Has Keras write as it does, on each worker, inside the context."""
    token = _is_saving.set(True)
    try:
        yield
    finally:
        _is_saving.reset(token)


def method_of(model: keras.Model, name: str) -> Callable[..., None]:
    """Returns one of a model's `METHODS`, for all workers to call."""
    original = getattr(type(model), name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> None:
        _save(model, original, (model, *args), kwargs)

    return method


@as_hook
def hook_save(
    original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any
) -> Any:
    """Stands for a function that saves a model, or a part of one."""
    workers = getattr(strategy_of(model), "executor", None)
    workers = getattr(workers, "workers", None)
    if workers is None or _is_saving.get():
        return original(model, *args, **kwargs)
    return _save(model, original, (model, *args), kwargs)


def _save(
    model: keras.Model,
    original: Callable[..., Any],
    args: object,
    kwargs: object,
) -> None:
    """Saves a model on the chief; other workers wait for that."""
    workers: Workers = strategy_of(model).executor.workers
    with saving(), writing():
        if is_chief_only() or workers.messages is None:
            turn = ""
        else:
            turn = _turn(workers)
        _save_at(turn, model, original, args, kwargs)


@of_its_own("a save")
def _save_at(
    turn: str,
    model: keras.Model,
    original: Callable[..., Any],
    args: object,
    kwargs: object,
) -> None:
    """Saves under a name to which the others listen, if there is one."""
    workers: Workers = strategy_of(model).executor.workers
    is_chief, messages = workers.cluster.is_chief, workers.messages
    if not turn or messages is None:
        with readable_by_chief(model):
            if is_chief:
                _write(original, args, kwargs)
        return
    # In the next context, the chief alone has sharded variables.
    digest = drift.digest_of(model)
    with readable_by_chief(model):
        if is_chief:
            with _announcing(messages, turn, digest):
                _write(original, args, kwargs)
            return
        chiefs = _heard(workers, turn)
    if chiefs.size:
        drift.check_digest(model, digest, chiefs)


@contextlib.contextmanager
def _announcing(
    messages: Messages, turn: str, digest: np.ndarray
) -> Iterator[None]:
    """Tells the other workers when the chief begins to save, and ends."""
    messages.say(turn, BEGUN)
    try:
        yield
    except BaseException:
        # Without the board, the others find out that this one is lost.
        with contextlib.suppress(Exception):
            messages.say(turn, _FAILED)
        raise
    messages.say(turn, _DONE + digest.tobytes().hex())


def _heard(workers: Workers, turn: str) -> np.ndarray:
    """Waits until the chief has saved, and returns its digest.

    If the chief has made a later save meanwhile, the digest is empty.
    """
    assert workers.messages is not None
    patience = workers.options.timeout_seconds or _PATIENCE
    what = f"the save in {place()}"
    text = workers.messages.hear(turn, what, patience)
    if text == _FAILED:
        raise could_not(0, "save the model")
    chiefs = np.frombuffer(bytes.fromhex(text.removeprefix(_DONE)))
    return chiefs.reshape(-1, 2)


def _turn(workers: Workers) -> str:
    """Returns the name of a save, the same on all workers that come to it."""
    key, _ = where()
    return f"{zlib.crc32(key.encode()):x}-{workers.recorder.count(key)}"


def _write(original: Any, args: Any, kwargs: Any) -> None:
    given = inspect.signature(original).bind(*args, **kwargs)
    path = _local_file(given.arguments)
    if path is None:
        original(*given.args, **given.kwargs)
        return
    with written_beside(path) as beside:
        given.arguments["filepath"] = beside
        original(*given.args, **given.kwargs)


def _local_file(arguments: dict[str, Any]) -> str | None:
    """Returns the path of one local file to write without asking, or `None`."""
    path = arguments.get("filepath")
    if not isinstance(path, (str, os.PathLike)):
        return None
    text: str = os.fspath(path)
    asks = not arguments.get("overwrite", True) and os.path.exists(text)
    is_one_file = (
        text.endswith((".keras", ".h5"))
        and arguments.get("max_shard_size") is None
        and arguments.get("zipped", True) is not False
    )
    is_local = "://" not in text
    return text if is_one_file and is_local and not asks else None
