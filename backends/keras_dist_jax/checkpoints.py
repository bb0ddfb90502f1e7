"""Sharded checkpoints, by orbax.

A sharded array is written with the zeros behind it, of which there may be more
or fewer on another number of devices: what is read is cut or filled.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import keras
import numpy as np

from keras_dist.errors import UnsupportedBackendError
from keras_dist.plugins import SyncOnReadVariable
from keras_dist.plugins import Writing
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.executors.executor import JaxExecutor
from keras_dist_jax.sharding import shards

_ARRAYS = "arrays"


def load_orbax() -> Any:
    """Imports orbax, which takes a second."""
    try:
        import orbax.checkpoint as orbax
    except ModuleNotFoundError as error:
        raise UnsupportedBackendError(
            "On JAX, checkpoints in parts are written by orbax. Received: the "
            f"module '{error.name}' is not installed. Install it with "
            "`pip install 'keras-dist[sharded-checkpoints]'`."
        ) from error
    logging.getLogger("absl").addFilter(_is_for_users)
    return orbax


def _is_for_users(record: logging.LogRecord) -> bool:
    # Where a worker saves alone, orbax warns that it won't log the size.
    return "`primary_host=None`" not in str(record.msg)


def save(
    model: keras.Model,
    executor: JaxExecutor | None,
    variables: Mapping[str, keras.Variable],
    folder: str,
) -> Writing:
    """Begins to write variables, each worker what its devices have.

    When this returns, the values are in the host's memory. On a CPU this may be
    that of the arrays: JAX gives it to no program as long as it is read.
    """
    orbax = load_orbax()
    from etils import epath  # orbax brings it

    _sync(model)
    arrays = {
        name: _array_of(variable, executor)
        for name, variable in variables.items()
    }
    workers = None if executor is None else executor.workers
    # Workers that save alone all write what only the chief does otherwise.
    options = orbax.options.MultiprocessingOptions(
        primary_host=None if workers is None else 0
    )
    handler = orbax.PyTreeCheckpointHandler(multiprocessing_options=options)
    path = epath.Path(_path(folder))
    path.mkdir(exist_ok=True)
    begun = handler.async_save(path, args=orbax.args.PyTreeSave(arrays))
    # In a thread: a notebook has an event loop that runs already.
    with _alone(executor), ThreadPoolExecutor(1) as pool:
        commits = pool.submit(asyncio.run, begun).result()
    return _ArraysWriting(handler, path, commits)


class _ArraysWriting(Writing):
    """Arrays that orbax writes.

    Its checkpointers would wait for the other workers in a program of theirs,
    or for 20 minutes if one of them had an error."""

    def __init__(self, handler: Any, path: Any, commits: Sequence[Any]) -> None:
        self._handler = handler
        self._path = path
        self._commits = commits

    def write(self) -> str:
        for commit in self._commits:
            commit.result()
        return ""

    def finish(self, texts: Sequence[str]) -> None:
        self._handler.finalize(self._path)


def restore(
    model: keras.Model,
    executor: JaxExecutor | None,
    variables: Mapping[str, keras.Variable],
    folder: str,
) -> None:
    """Sets variables, of which each worker reads what its devices keep."""
    orbax = load_orbax()
    _sync(model)
    wanted = {
        name: _wanted(variable, executor)
        for name, variable in variables.items()
    }
    args = orbax.args.PyTreeRestore(
        item=dict.fromkeys(wanted, 0),
        restore_args={
            name: orbax.ArrayRestoreArgs(
                sharding=array.sharding,
                global_shape=array.shape,
                dtype=array.dtype,
                strict=False,
            )
            for name, array in wanted.items()
        },
        partial_restore=True,
    )
    with _alone(executor), _checkpointer(orbax) as checkpointer:
        arrays = checkpointer.restore(_path(folder), args=args)
    for name, variable in variables.items():
        _set(variable, arrays[name], executor)


def _path(folder: str) -> str:
    return os.path.join(folder, _ARRAYS)


def _checkpointer(orbax: Any) -> Any:
    return orbax.Checkpointer(orbax.PyTreeCheckpointHandler())


def _sync(model: keras.Model) -> None:
    """Has variables keep their newest values, also inside of `fit`."""
    for name in internals.SYNCS:
        getattr(model, name)()


@contextlib.contextmanager
def _alone(executor: JaxExecutor | None) -> Iterator[None]:
    """Lets no program run inside but orbax', in which workers wait."""
    if executor is None:
        yield
        return
    with executor.throttle.lock:
        executor.throttle.drain(None)
        yield


def _is_stored_sharded(variable: keras.Variable) -> bool:
    # The array of a scalar has one axis more.
    return shards.is_sharded(variable) and len(variable.shape) > 0


def _array_of(variable: keras.Variable, executor: JaxExecutor | None) -> Any:
    """Returns the array to write, on the devices of all workers."""
    if _is_stored_sharded(variable):
        return shards.stored(variable)
    array = internals.array_of(variable)
    if array is None or isinstance(variable, SyncOnReadVariable):
        array = variable.value
    if executor is None or not executor.layout.is_global:
        return array
    return executor.layout.to_global(executor.layout.place(array))


def _wanted(variable: keras.Variable, executor: JaxExecutor | None) -> Any:
    """Describes the array to read: its shape, dtype and sharding."""
    if _is_stored_sharded(variable):
        array = shards.stored(variable)
        return jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=array.sharding
        )
    if executor is not None and executor.layout.is_global:
        sharding = executor.layout.replicated
    else:
        sharding = _array_of(variable, executor).sharding
    return jax.ShapeDtypeStruct(
        variable.shape, variable.dtype, sharding=sharding
    )


def _set(
    variable: keras.Variable, array: jax.Array, executor: JaxExecutor | None
) -> None:
    if _is_stored_sharded(variable):
        shards.set_array(variable, array)
        return
    if executor is not None:
        array = executor.layout.to_local(array)
    if shards.is_sharded(variable):
        division = shards.shards_of(variable)
        shards.set_array(variable, division.put(np.asarray(array)))
    elif isinstance(variable, SyncOnReadVariable):
        variable.assign(array)
    else:
        keras.Variable.assign(variable, array)
