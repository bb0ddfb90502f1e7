"""The demo, which trains on several virtual replicas and again on one device.

1,507 rows in batches of 100 leave a last batch of 7, which replicas can't share
equally. The numbers must be those of one device all the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from typing import TextIO

import keras
import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.progress import TextColumn
from sklearn.datasets import load_digits

from keras_dist.cli.jobs.digits import Array
from keras_dist.cli.jobs.digits import largest_difference
from keras_dist.planning.tables import pairs_table
from keras_dist.planning.tables import progress_bar
from keras_dist.plugin.backend import list_devices
from keras_dist.plugin.backend import set_virtual_devices
from keras_dist.strategies.mirrored import MirroredStrategy
from keras_dist.tools.summary import summary

NUM_TRAIN_ROWS = 1507
BATCH_SIZE = 100
SEED = 7

# Another order of float32 sums changes weights by a few 1e-7 here. One batch
# whose rows have the wrong weight changes them by 1e-3 or more.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Digits:
    """Scikit-learn's digits: images of shape (rows, 8, 8, 1) in [0, 1]."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array

    @classmethod
    def load(cls) -> "Digits":
        data = load_digits()
        order = np.random.default_rng(SEED).permutation(len(data.target))
        x = (data.images[order, :, :, np.newaxis] / 16.0).astype("float32")
        y = data.target[order].astype("float32")
        return cls(
            x[:NUM_TRAIN_ROWS],
            y[:NUM_TRAIN_ROWS],
            x[NUM_TRAIN_ROWS:],
            y[NUM_TRAIN_ROWS:],
        )


class TrainingProgress(keras.callbacks.Callback):
    """A progress bar on a terminal; if verbose, a line for each epoch stays."""

    def __init__(
        self,
        title: str,
        on_batch: Callable[[], None],
        stderr: TextIO,
        verbose: bool,
    ) -> None:
        super().__init__()
        self._on_batch = on_batch
        # Standard output begins with the verdict.
        self._console = Console(file=stderr, highlight=False)
        self._title = title
        self._verbose = verbose
        self.bar = progress_bar(
            self._console,
            MofNCompleteColumn(),
            TextColumn("{task.fields[logs]}"),
            transient=not verbose,
        )

    def on_epoch_begin(
        self, epoch: int, logs: dict[str, float] | None = None
    ) -> None:
        self._label = f"{self._title}, epoch {epoch + 1}"
        self._task = self.bar.add_task(
            self._label, total=self.params["steps"], logs=""
        )

    def on_train_batch_end(
        self, batch: int, logs: dict[str, float] | None = None
    ) -> None:
        self.bar.update(self._task, completed=batch + 1)
        self._on_batch()

    def on_epoch_end(
        self, epoch: int, logs: dict[str, float] | None = None
    ) -> None:
        text = "  ".join(
            f"{name} {value:.4f}" for name, value in (logs or {}).items()
        )
        self.bar.update(self._task, logs=text)
        if self._verbose and not self._console.is_terminal:
            self._console.print(f"{self._label}:  {text}")


def run_demo(
    replicas: int,
    epochs: int,
    on_batch: Callable[[], None],
    stderr: TextIO,
    verbose: bool,
) -> bool:
    """Trains on replicas and on one device; returns whether weights agree."""
    digits = Digits.load()
    set_virtual_devices(replicas)
    strategy = MirroredStrategy([f"cpu:{i}" for i in range(replicas)])

    def train(model: keras.Model, where: str) -> None:
        progress = TrainingProgress(where, on_batch, stderr, verbose)
        fit(model, digits, epochs, progress)

    with strategy.scope():
        model = build_model()
    initial = model.get_weights()
    train(model, "on replicas")

    plain = build_model()
    plain.set_weights(initial)
    train(plain, "on one device")

    console = Console(highlight=False)
    same = show_verdict(console, digits, model, plain)
    show_setting(console, strategy)
    if verbose:
        console.print()
        console.print(summary(model))
    return same


def build_model() -> keras.Model:
    """Returns a convolutional net whose numbers depend on the whole batch."""
    keras.utils.set_random_seed(SEED)
    # Smooth activations: at the kink of a ReLU, a difference in the last digit
    # turns a gradient on or off, and two correct trainings diverge.
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, use_bias=False, name="conv_1"),
            keras.layers.BatchNormalization(momentum=0.95, name="norm"),
            keras.layers.Activation("silu"),
            keras.layers.Conv2D(32, 3, activation="silu", name="conv_2"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, name="logits"),
        ],
        name="net",
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9, name="sgd"),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def fit(
    model: keras.Model, digits: Digits, epochs: int, progress: TrainingProgress
) -> None:
    """Fits a model, on the same batches in the same order every time."""
    with progress.bar:
        model.fit(
            digits.x_train,
            digits.y_train,
            batch_size=BATCH_SIZE,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[progress],
        )


def show_setting(console: Console, strategy: MirroredStrategy) -> None:
    """Prints the backend, the devices, the replicas and the batch sizes."""
    backend = keras.backend.backend()
    replicas = strategy.num_replicas_in_sync
    pairs = {
        "Backend": f"{backend} {version(backend)}",
        "Keras": keras.__version__,
        "Devices": " ".join(list_devices("cpu")),
        "Replicas": replicas,
        "Global batch": f"{BATCH_SIZE} rows",
        "Per-replica batch": per_replica(BATCH_SIZE, replicas),
        "Last global batch": f"{NUM_TRAIN_ROWS % BATCH_SIZE} rows",
    }
    console.print()
    console.print(pairs_table(pairs))


def per_replica(rows: int, replicas: int) -> str:
    if rows % replicas == 0:
        return f"{rows // replicas} rows"
    return f"at most {rows // replicas + 1} rows"


def show_verdict(
    console: Console,
    digits: Digits,
    model: keras.Model,
    plain: keras.Model,
) -> bool:
    """Prints the verdict and accuracies; returns whether the weights agree."""
    difference = largest_difference(model.get_weights(), plain.get_weights())
    # A comparison with NaN is false, so weights that blew up fail.
    same = difference <= TOLERANCE
    pairs = {
        "Test accuracy on replicas": accuracy(model, digits),
        "Test accuracy on one device": accuracy(plain, digits),
        "Largest difference in weights": f"{difference:.2e} (tolerance "
        f"{TOLERANCE:.0e})",
    }
    if same:
        console.print("[bold green]PASS[/] the same weights as one device")
    else:
        console.print("[bold red]FAIL[/] different weights from one device")
    console.print()
    console.print(pairs_table(pairs))
    return same


def accuracy(model: keras.Model, digits: Digits) -> str:
    logs: dict[str, Any] = model.evaluate(
        digits.x_test,
        digits.y_test,
        batch_size=BATCH_SIZE,
        verbose=0,
        return_dict=True,
    )
    return f"{logs['accuracy']:.4f}"
