"""The loops of one worker among several, and who can make native ones."""

import contextlib
import itertools
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import keras

from keras_dist.bench.loops import LEARNING_RATE
from keras_dist.bench.loops import Batch
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.portable import build_model
from keras_dist.fit.workers.alone import alone_on_purpose
from keras_dist.plugin.workers import Workers
from keras_dist.strategies.strategy import Strategy


class NativeWorkers(ABC):
    """The framework's own distribution over the workers of a cluster."""

    @property
    @abstractmethod
    def text(self) -> str:
        """What a native loop is, in a sentence for people."""

    @abstractmethod
    def loop(self, setting: Setting) -> Loop:
        """A loop as the framework's users write it; all workers make it.

        It takes NumPy batches, and of each the rows that are this worker's.
        What it returns is the loss over these rows, or over all.

        Args:
            setting: `Setting`, whose devices are one of each worker.
        """

    def other_loops(self, setting: Setting) -> dict[str, Loop]:
        """Further loops by name, that tell where a difference comes from.

        Args:
            setting: `Setting`.
        """
        return {}

    def collectives(self, loop: Loop, steps: int) -> int | None:
        """How many collectives steps take, of whichever loop.

        Args:
            loop: `Loop` to run.
            steps: Integer.

        Returns:
            Integer, or `None` where the framework doesn't tell.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Ends what it has started."""


class BenchmarksWorkers(ABC):
    """A `Backend` with native distribution over workers to compare with.

    Optimizer and loss are those of `BenchmarksLoops`.
    """

    @abstractmethod
    def native_workers(self, workers: Workers) -> NativeWorkers:
        """Starts the framework's own distribution, beside ours.

        Args:
            workers: `Workers` of this backend, which have met.
        """


class BatchLoop(Loop):
    """Calls `train_on_batch`, which is the step of `fit`.

    Args:
        setting: `Setting`.
        batches: List of NumPy batches.
        strategy: `Strategy`, or `None` for Keras alone.
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
    """The batches' rows that are a worker's.

    Args:
        setting: `Setting`, whose devices are one of each worker.
        worker: Integer.
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
