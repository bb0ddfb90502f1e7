"""Checkpoints in parts: each worker writes and reads what its devices have."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist.errors import UnsupportedModelError
from keras_dist.fit.plain_models import strategy_of
from keras_dist.fit.workers.checkpoint_folder import CheckpointFolder
from keras_dist.fit.workers.matching import Groups
from keras_dist.fit.workers.matching import described
from keras_dist.fit.workers.matching import key
from keras_dist.fit.workers.matching import matched
from keras_dist.fit.workers.state_file import build_optimizer
from keras_dist.fit.workers.together import check_alike
from keras_dist.fit.workers.together import raise_explained
from keras_dist.internals import keras_internals
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.executor import Executor
from keras_dist.plugin.powers import SavesParts

_BACKEND, _VARIABLES = "backend", "variables"
_MODEL = "model"


def save_sharded(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Saves a model's training state in parts, which the workers write.

    The checkpoint holds the model's weights, the states of its seed
    generators, and its optimizers' variables, with averages, accumulated
    gradients and the loss scale. It does not hold metrics and the model's
    configuration. A sharded variable is never put together: each worker
    writes the parts that its devices have. Other variables are written once.
    `keras_dist.restore_sharded` reads the checkpoint, also with another number
    of devices or workers, or without a strategy.

    On several workers, call it on all of them, with a path on a disk that they
    share. A checkpoint that is at `path` already is replaced once the new one
    is complete, so a crash leaves the old one.

    `use_ema=True` has `fit` overwrite the weights by their averages at its end.
    To go on as if training had not been interrupted, save in a callback.

    On JAX it needs orbax: `pip install "keras-dist[sharded-checkpoints]"`.

    Args:
        model: A built `keras.Model`, with or without a strategy. If it is
            compiled, its optimizer is built if that is needed.
        path: String or path, the folder to write. It is made if it is not
            there.

    Raises:
        ValueError: If the model is not built, or if `path` is a file or the
            address of another host.
        ClusterError: If a worker does not see the others' files.
        UnsupportedModelError: On TensorFlow.
        UnsupportedBackendError: If orbax is not installed.

    Example:

    ```python
    class SaveEachEpoch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            keras_dist.save_sharded(self.model, "checkpoint")

    strategy = keras_dist.MirroredStrategy(variables="sharded")
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
        model.compile("adam", "mse")
    x = np.ones((32, 64))
    model.fit(x, x, epochs=3, callbacks=[SaveEachEpoch()])
    ```
    """
    state = TrainingState(model, path)
    groups = state.groups
    parts = state.folder.make_parts()
    named = {
        key(group, position): variable
        for group, variables in groups.items()
        for position, variable in enumerate(variables)
    }
    with state.explained():
        state.power.save_parts(model, state.executor, named, parts)
    index = {
        _BACKEND: keras.backend.backend(),
        _VARIABLES: {
            group: [*map(described, variables)]
            for group, variables in groups.items()
        },
    }
    state.folder.commit(parts, index)


def restore_sharded(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Restores a model's training state from a checkpoint in parts.

    Each worker reads what its devices keep. The numbers of workers and devices
    may differ from those that saved, and so may the strategy. The backend and
    the model's variables must be the same. Variables are found by their paths
    or, if Keras has numbered layers' names differently, by their order.

    A model that is not compiled takes its weights alone. On several workers,
    call it on all of them. Unless reading itself fails, nothing of the model
    has changed after an error.

    Args:
        model: A built `keras.Model`, with or without a strategy. If it is
            compiled, its optimizer is built if that is needed.
        path: String or path, the folder that `keras_dist.save_sharded` wrote.

    Raises:
        FileNotFoundError: If there is no complete checkpoint.
        ValueError: If the checkpoint is of another backend or has other
            variables, or if the model is not built.
        ClusterError: If workers find different checkpoints.
        UnsupportedModelError: On TensorFlow.
        UnsupportedBackendError: If orbax is not installed (JAX).

    Example:

    ```python
    with keras_dist.MirroredStrategy(variables="sharded").scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
        model.compile("adam", "mse")
    keras_dist.restore_sharded(model, "checkpoint")
    x = np.ones((32, 64))
    model.fit(x, x, initial_epoch=3, epochs=5)
    ```
    """
    state = TrainingState(model, path)
    index, parts = state.folder.read()
    backend = keras.backend.backend()
    if index[_BACKEND] != backend:
        raise ValueError(
            "A checkpoint in parts is for the backend that saved it. "
            f"Received: path='{path}', of the backend '{index[_BACKEND]}'. "
            f"Expected: a checkpoint of '{backend}', or KERAS_BACKEND="
            f"{index[_BACKEND]}. `model.save_weights` saves for all backends."
        )
    groups, saved = state.groups, index[_VARIABLES]
    if set(groups) == {_MODEL}:
        saved = {_MODEL: saved[_MODEL]}
    named = matched(groups, saved)
    with state.explained():
        state.power.restore_parts(model, state.executor, named, parts)


class TrainingState:
    """The state of a model, who keeps it, and where it is saved."""

    def __init__(self, model: keras.Model, path: Any) -> None:
        self.power = _power()
        strategy = strategy_of(model)
        self.executor: Executor | None = getattr(strategy, "executor", None)
        self.workers = getattr(self.executor, "workers", None)
        self.folder = CheckpointFolder(path, self.workers)
        if not model.built:
            raise ValueError(
                "Only a model with variables can be saved and restored. "
                f"Received: model '{model.name}', which is not built. Build "
                "it with `model.build(input_shape)`, or call it on a batch."
            )
        if self.workers is not None:
            self.workers.meet("save_sharded or restore_sharded")
        self.groups = _groups(model)
        if self.workers is not None:
            every = [v for group in self.groups.values() for v in group]
            check_alike(every, self.workers)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Names a lost worker if that is why something fails inside."""
        try:
            yield
        except Exception as error:
            raise_explained(error, self.workers)
            raise


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
    build_optimizer(model)
    metrics = keras_internals.all_metrics(model)
    left_out = {id(v) for metric in metrics for v in metric.variables}
    groups: Groups = {_MODEL: list(model.variables)}
    for name, optimizer in _optimizers(model).items():
        groups[name] = list(optimizer.variables)
    for group, variables in groups.items():
        own = {id(v): v for v in variables if id(v) not in left_out}
        left_out.update(own)
        groups[group] = list(own.values())
    return groups


def _optimizers(model: keras.Model) -> dict[str, Any]:
    """Returns a model's optimizers, also those of a step of its own."""
    found = {}
    compiled = getattr(model, "optimizer", None)
    if compiled is not None:
        found["optimizer"] = compiled
    for name, value in vars(model).items():
        is_other = isinstance(value, keras.optimizers.Optimizer)
        if is_other and value is not compiled:
            found[name] = value
    return found
