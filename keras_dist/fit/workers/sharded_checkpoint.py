"""Sharded checkpoints: each worker writes and reads what its devices have."""

import os
from concurrent.futures import Future

import keras

from keras_dist.fit.workers.training_state import TrainingState


def save_sharded(
    model: keras.Model, path: str | os.PathLike[str], wait: bool = True
) -> Future[None]:
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

    With `wait=False`, the values are copied to the host's memory, and a thread
    writes them while training goes on. The next `save_sharded` or
    `restore_sharded`, a backup of `BackupAndRestore` in parts, and the end of
    the program wait until they are written. If writing fails, the error is
    raised by `result()` of what is returned, or else by the next of these
    calls. At the end of the program it can only be printed.

    `use_ema=True` has `fit` overwrite the weights by their averages at its end.
    To go on as if training had not been interrupted, save in a callback.

    On JAX it needs orbax: `pip install "keras-dist[sharded-checkpoints]"`.

    Args:
        model: A built `keras.Model`, with or without a strategy. If it is
            compiled, its optimizer is built if that is needed.
        path: String or path, the folder to write. It is made if it is not
            there.
        wait: Boolean, whether to return only when the checkpoint is complete.

    Returns:
        A `concurrent.futures.Future`. Its `result()` waits until the
        checkpoint is complete, raises the error of writing it, and returns
        `None`. With `wait=True` it is done.

    Raises:
        TypeError: If `model` is no `keras.Model`.
        ValueError: If the model is not built, or if `path` is a file or the
            address of another host.
        ClusterError: If a worker does not see the others' files.
        UnsupportedModelError: On TensorFlow.
        UnsupportedBackendError: If orbax is not installed.

    Example:

    ```python
    class SaveEachEpoch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            keras_dist.save_sharded(self.model, "checkpoint", wait=False)

    strategy = keras_dist.MirroredStrategy(variables="sharded")
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
        model.compile("adam", "mse")
    x = np.ones((32, 64))
    model.fit(x, x, epochs=3, callbacks=[SaveEachEpoch()])
    ```
    """
    return TrainingState(model, path).save(wait=wait)


def restore_sharded(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Restores a model's training state from a sharded checkpoint.

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
        TypeError: If `model` is no `keras.Model`.
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
    TrainingState(model, path).restore()
