"""What workers run in `test_epochs.py`: `fit`, and how often workers meet."""

import keras
import numpy as np

import keras_dist

X = np.arange(24.0, dtype="float32").reshape(8, 3) / 24


class Counts:
    """How often this worker told the others numbers, or took the chief's
    values, outside of steps."""

    def __init__(self, workers):
        self._found = {"numbers": 0, "values": 0}
        self._count(workers, "concatenate_numbers", "numbers")
        self._count(workers, "broadcast", "values")

    def _count(self, workers, method, name):
        original = getattr(workers, method)

        def counted(*args):
            self._found[name] += 1
            return original(*args)

        setattr(workers, method, counted)

    def of(self, fn):
        before = dict(self._found)
        fn()
        return {name: n - before[name] for name, n in self._found.items()}


def everything():
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    workers = strategy.executor.workers
    counts = Counts(workers)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")

    def fit(epochs, **options):
        data = X, X[:, :1]
        model.fit(*data, batch_size=4, epochs=epochs, verbose=0, **options)

    fit(1)
    found = {
        1: counts.of(lambda: fit(1)),
        3: counts.of(lambda: fit(3)),
        "validation": counts.of(lambda: fit(3, validation_data=(X, X[:, :1]))),
        "callback": counts.of(lambda: fit(3, callbacks=callback_of(workers))),
        "evaluate": counts.of(
            lambda: model.evaluate(X, X[:, :1], batch_size=4, verbose=0)
        ),
    }
    if not workers.cluster.is_chief:
        model.set_weights([w + 1 for w in model.get_weights()])
    found["other values"] = counts.of(lambda: fit(1))
    return found, [w.tolist() for w in model.get_weights()]


def callback_of(workers):
    """A callback that only the last worker has."""
    if workers.cluster.is_chief:
        return []
    return [keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: None)]
