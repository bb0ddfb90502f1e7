"""The steps that were trained before a restart are read and not trained."""

import keras
import numpy as np
import pytest

from keras_dist.fit.workers.backup import Skipping
from keras_versions import several_steps

pytestmark = several_steps


class _SkipsFirst(keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.epoch = None
        self.went_on_in = []

    def on_train_begin(self, logs=None):
        Skipping(self.model, [], self.steps, self.go_on)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def go_on(self, batch):
        self.went_on_in.append(self.epoch)


@pytest.mark.parametrize(
    ("executions", "steps", "trained"), [(2, 2, 8), (2, 6, 5), (3, 6, 5)]
)
def test_the_last_execution_of_an_epoch_may_have_fewer_steps(
    executions, steps, trained
):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=executions)
    callback = _SkipsFirst(steps)
    rows = np.ones((5, 2), "float32")
    model.fit(
        *(rows, rows[:, :1]),
        batch_size=1,
        epochs=2,
        callbacks=[callback],
        verbose=0,
    )
    assert callback.went_on_in == [0]
    assert int(model.optimizer.iterations.value) == trained
