"""The demo, which trains on several virtual replicas and compares.

1,507 rows in batches of 100 leave a last batch of 7, which replicas can't share
equally. The numbers must be those of one device all the same.
"""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any
from typing import TextIO

import keras
import numpy as np
from rich.console import Console
from rich.status import Status
from sklearn.datasets import load_digits

from keras_dist.cli.jobs import digits
from keras_dist.planning.tables import pairs_table
from keras_dist.plugin.backend import list_devices
from keras_dist.plugin.backend import set_virtual_devices
from keras_dist.strategies.mirrored import MirroredStrategy
from keras_dist.tools.summary import summary

NUM_TRAIN_ROWS = 1507
BATCH_SIZE = 100


class TrainingProgress(keras.callbacks.Callback):
    """Shows the epoch in a status; if verbose, a line for each epoch stays."""

    def __init__(
        self, status: Status, on_batch: Callable[[], None], verbose: bool
    ) -> None:
        super().__init__()
        self._status = status
        self._on_batch = on_batch
        self._verbose = verbose

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._label = f"on replicas, epoch {epoch + 1}"
        self._status.update(self._label)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._on_batch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        text = "  ".join(f"{n} {value:.4f}" for n, value in logs.items())
        if self._verbose:
            self._status.console.print(f"{self._label}:  {text}")


def run_demo(
    replicas: int,
    epochs: int,
    on_batch: Callable[[], None],
    stderr: TextIO,
    verbose: bool,
) -> bool:
    """Trains on replicas; returns whether numbers are those of one device."""
    loaded = load_digits()
    order = np.random.default_rng(digits.SEED).permutation(len(loaded.target))
    x = (loaded.data[order] / 16.0).astype("float32")
    y = loaded.target[order].astype("float32")
    train, test = slice(NUM_TRAIN_ROWS), slice(NUM_TRAIN_ROWS, None)
    set_virtual_devices(replicas)
    strategy = MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    keras.utils.set_random_seed(digits.SEED)
    with strategy.scope():
        model = digits.model()
    # Standard output begins with the verdict.
    errors = Console(file=stderr, highlight=False)
    with errors.status("") as status:
        model.fit(
            x[train],
            y[train],
            batch_size=BATCH_SIZE,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[TrainingProgress(status, on_batch, verbose)],
        )
        status.update("compared with one device")
        # The first batch, and the last one, which has fewer rows.
        last = slice(NUM_TRAIN_ROWS // BATCH_SIZE * BATCH_SIZE, NUM_TRAIN_ROWS)
        batches = [(x[rows], y[rows]) for rows in (slice(BATCH_SIZE), last)]
        report = strategy.verify(digits.model, batches)
        logs: dict[str, Any] = model.evaluate(
            x[test], y[test], len(x[test]), verbose=0, return_dict=True
        )
    console = Console(highlight=False)
    same = report.same and report.not_finite is None
    if same:
        console.print("[bold green]PASS[/] the same weights as one device")
    else:
        console.print("[bold red]FAIL[/] different numbers from one device")
    console.print()
    backend = keras.backend.backend()
    share, rest = divmod(BATCH_SIZE, replicas)
    pairs = {
        "Compared with one device": report.verdict,
        "Test accuracy": f"{logs['accuracy']:.4f}",
        "Backend": f"{backend} {version(backend)}",
        "Keras": keras.__version__,
        "Devices": " ".join(list_devices("cpu")),
        "Replicas": replicas,
        "Global batch": f"{BATCH_SIZE} rows",
        "Per-replica batch": f"at most {share + 1} rows"
        if rest
        else f"{share} rows",
        "Last global batch": f"{NUM_TRAIN_ROWS % BATCH_SIZE} rows",
    }
    console.print(pairs_table(pairs))
    for shown in [report, summary(model)] if verbose else []:
        console.print()
        console.print(shown)
    return same
