"""Training over workers where rows take long to load."""

import time

import keras

from bench import settings
from keras_dist.bench import measure
from keras_dist.plugin.membership import alone_on_purpose

# The name of the model with dear input, and the seconds that a row takes.
NAME, SECONDS = "input", 0.005


class Rows(keras.utils.PyDataset):
    """Batches of a small model's rows, which a worker may load its own of."""

    def __init__(self, setting, steps):
        super().__init__()
        self._batches = setting.batches()
        self._steps = steps

    def __len__(self):
        return self._steps

    def __getitem__(self, index, own=lambda rows: rows):
        x, y = map(own, self._batches[index % len(self._batches)])
        time.sleep(SECONDS * len(x))
        return x, y


class Fit:
    """An arm of `fit`, built and called in contexts."""

    def __init__(self, setting, built_in, runs_in):
        self._setting, self._runs_in = setting, runs_in
        with built_in():
            self._model = setting.compiled()

    def __call__(self, steps):
        data = Rows(self._setting, steps)
        with self._runs_in():
            history = self._model.fit(data, shuffle=False, verbose=0)
        return history.history["loss"][-1]


def measured(strategy, setting, rounds):
    """Measures an epoch of all workers beside one of one process."""
    alone = alone_on_purpose, alone_on_purpose
    arms = {
        "native": Fit(setting, *alone),
        "ours": Fit(setting, strategy.scope, strategy.scope),
        measure.AGAIN: Fit(setting, *alone),
    }
    losses = {name: arm(measure.FEW) for name, arm in arms.items()}
    times = measure.time_arms(
        arms,
        measure.FEW,
        rounds,
        lambda: None,
        on_block=lambda: strategy.executor.workers.barrier("a block"),
        with_start=list(arms),
    )
    result = settings.measurement(setting, measure.FEW, times, losses, {})
    settings.check_losses(result)
    return result
