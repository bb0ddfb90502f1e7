"""The loops of one worker."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import keras

from keras_dist.bench.loops import LEARNING_RATE
from keras_dist.bench.loops import Batch
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.portable import build_model
from keras_dist.fit.alone import alone_on_purpose
from keras_dist.strategies.strategy import Strategy


class BatchLoop(Loop):
    """A loop that calls `train_on_batch`, which is the step of `fit`.

    Without a strategy, it is plain Keras.
    """

    def __init__(
        self, setting: Setting, batches: list[Batch], strategy: Strategy | None
    ) -> None:
        self._batches = batches
        self._around: Callable[[], contextlib.AbstractContextManager[Any]]
        self._around = contextlib.nullcontext
        if strategy is None:
            self._around = alone_on_purpose
            self._model = compiled(setting)
        else:
            with strategy.scope():
                self._model = compiled(setting)

    def run(self, steps: int) -> float:
        step = self._model.train_on_batch
        with self._around():
            for x, y in itertools.islice(itertools.cycle(self._batches), steps):
                loss = step(x, y)
        return float(loss)


def rows_of(setting: Setting, worker: int) -> list[Batch]:
    """Returns a worker's rows of all batches.

    The setting has one device of each worker.
    """
    each = setting.size.rows // setting.num_replicas
    rows = slice(worker * each, (worker + 1) * each)
    return [(x[rows], y[rows]) for x, y in setting.batches()]


def compiled(setting: Setting) -> keras.Model:
    model = build_model(setting)
    model.compile(
        keras.optimizers.Adam(LEARNING_RATE),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model
