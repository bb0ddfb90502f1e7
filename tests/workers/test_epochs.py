"""Workers meet a few times for a `fit` and for an epoch, outside of steps."""

import keras
import numpy as np
import pytest

import keras_dist
from workers.clusters import on_workers

X = np.arange(24.0, dtype="float32").reshape(8, 3) / 24
FIT = {"batch_size": 4, "verbose": 0}


def counting(original, name, found):
    def counted(*args):
        found[name] += 1
        return original(*args)

    return counted


class Program:
    """A worker's model, and how often it told the others numbers, or took the
    chief's values, outside of steps."""

    def __init__(self, patch):
        strategy = keras_dist.MultiWorkerMirroredStrategy()
        self.found = {"concatenate_numbers": 0, "broadcast": 0}
        workers = strategy.executor.workers
        for name in self.found:
            counted = counting(getattr(workers, name), name, self.found)
            patch.setattr(workers, name, counted)
        self.is_chief = workers.cluster.is_chief
        with strategy.scope():
            self.model = keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(1)]
            )
            self.model.compile("adam", "mse")
        self.model.fit(X, X[:, :1], **FIT)

    def counts(self, method="fit", **options):
        before = list(self.found.values())
        getattr(self.model, method)(X, X[:, :1], **FIT, **options)
        after = self.found.values()
        return [a - b for a, b in zip(after, before, strict=True)]


@on_workers()
def test_exchanges_of_a_fit_and_of_an_epoch():
    with pytest.MonkeyPatch.context() as patch:
        program = Program(patch)
        # For the call with its data and random states, for the variables, and
        # at the end of each epoch.
        assert program.counts(epochs=1) == [2 + 1, 0]
        assert program.counts(epochs=3) == [2 + 3, 0]
        validation = {"validation_data": (X, X[:, :1])}
        assert program.counts(epochs=3, **validation) == [2 + 3, 0]
        assert program.counts("evaluate") == [2, 0]
        # A callback of any worker may decide at the beginning: at both ends of
        # an epoch, and at the end of `fit`.
        begins = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: None)
        callbacks = [] if program.is_chief else [begins]
        exchanges = program.counts(epochs=3, callbacks=callbacks)
        assert exchanges == [2 + 2 * 3 + 1, 0]


@on_workers()
def test_values_that_differ_become_the_chiefs():
    with pytest.MonkeyPatch.context() as patch:
        program = Program(patch)
        model = program.model
        if not program.is_chief:
            model.set_weights([w + 1 for w in model.get_weights()])
        assert program.counts(epochs=1) == [2 + 1, 1]
        return [w.tolist() for w in model.get_weights()]
