"""Programs that use strategies and drop them, and what they leave replaced.

A process runs them all, because other tests may hold models for a while. It
writes, by program, the places that differ afterwards.
"""

import copy
import functools
import gc
import json
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import layers
from keras import ops

import foreign
import keras_dist
from keras_dist.plugin.front_end import HOOKS
from nothing_lost.in_threads import in_threads
from parity import harness
from parity.harness import strategy
from steps import train_step

BACKEND = keras.backend.backend()
X = np.linspace(-1.0, 1.0, 44, dtype="float32").reshape(11, 4)
DATA = {"x": X, "y": X[:, :1] ** 2}


class OwnCall(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.mean(ops.square(y_true - y_pred))


class Coupled(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred)) * ops.mean(ops.abs(y_pred))


class OwnApply(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        super().apply([0.5 * each for each in grads], trainable_variables)


class OwnMetric(keras.metrics.Mean):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


@keras.saving.register_keras_serializable()
class OwnLayer(layers.Layer):
    def call(self, x):
        self.add_loss(1e-3 * ops.mean(ops.square(x)))
        return 2.0 * x


def built(optimizer="adam", loss="mse"):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            layers.Input((4,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            OwnLayer(),
            layers.Dropout(0.3, seed=7),
            layers.Dense(1),
        ]
    )
    model.compile(optimizer, loss, metrics=["mae"], jit_compile=False)
    return model


def trained(model, **options):
    model.fit(**DATA, batch_size=5, epochs=2, verbose=0, **options)
    return model


def trained_in_order(model):
    # To shuffle, and without a seed, threads draw from common generators.
    return trained(model, shuffle=False)


def distributed(*args):
    with strategy(2).scope():
        return built(*args)


def fit_evaluate_predict():
    model = trained(distributed())
    model.evaluate(**DATA, verbose=0)
    model.predict(X, verbose=0)
    model.train_on_batch(**DATA)


def classes_of_users():
    with strategy(2).scope():
        model = built(OwnApply(0.1), OwnCall())
        OwnMetric()

    class Later(OwnCall):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    model.compile("sgd", Later())
    trained(model)


def central():
    with harness.central(2).scope():
        model = built()
    trained(model)


def sharded():
    if BACKEND != "jax":
        return  # they have no such strategy in one process
    with harness.sharded(2).scope():
        model = built()
    trained(model)


def run_eagerly():
    one = strategy(2)
    with one.scope():
        model, total = built(), keras.Variable(0.0, aggregation="sum")

    def step(x):
        total.assign_add(ops.sum(x))
        return model(x, training=True)

    batches = one.experimental_distribute_dataset(_batches())
    for x in batches:
        one.reduce("MEAN", one.run(step, args=(x,)), axis=0)
    one.run(lambda a: a + 1, args=(1.0,))


def run_compiled():
    one = strategy(2)
    with one.scope():
        model = built("sgd")
    step = keras_dist.function(
        train_step(
            model, model.optimizer, lambda x: ops.mean((model(x) - x) ** 2, 1)
        )
    )
    for x in one.experimental_distribute_dataset(_batches()):
        one.run(step, args=(x,))


def _batches():
    return [X[:4], X[4:8]]


def verify():
    one = strategy(2)
    with one.scope():
        model = built("sgd")
    report = one.verify(model, **DATA, batch_size=6)
    assert report.same, report


def save_and_load():
    one = strategy(2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model = trained(distributed())
        model.save(path)
        model.save_weights(Path(folder) / "it.weights.h5")
        with one.scope():
            trained(keras.models.load_model(path))
        keras.models.load_model(path)
        trained(copy.deepcopy(model))
        keras.models.clone_model(model)


class _StopError(Exception):
    pass


def _failing(error, where):
    armed = []

    def fail():
        if armed:
            raise error("stop")

    class Layer(layers.Layer):
        def call(self, x):
            if where == "layer":
                fail()
            return x

    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            if where == "data":
                fail()
            return X[:5], X[:5, :1]

    failing = keras.callbacks.Callback()
    if where == "callback":
        failing.on_train_batch_end = lambda batch, logs: fail()
    with strategy(2).scope():
        model = keras.Sequential([layers.Input((4,)), Layer(), layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
    armed.append(True)
    try:
        model.fit(Data(), epochs=2, verbose=0, callbacks=[failing])
    except (error, RuntimeError):
        return
    raise AssertionError("It did not fail.")


def two_threads():
    models = [distributed(), distributed()]
    in_threads(*(lambda m=m: trained(m) for m in models))


def another_library_wraps_it_too():
    """What somebody else put on top stays, and goes when they take it off."""
    with strategy(2).scope():
        ours = keras.Model.__init__

        def theirs(self, *args, **kwargs):
            ours(self, *args, **kwargs)

        keras.Model.__init__ = theirs
        model = built()
    trained(model)
    del model
    gc.collect()
    assert keras.Model.__init__ is theirs
    built()
    with strategy(2).scope():
        trained(built())
    gc.collect()
    keras.Model.__init__ = ours
    trained(distributed())


def another_library_takes_its_own_off():
    """It was on before ours came, and goes while ours are there."""
    original = keras.losses.Loss.__call__

    def theirs(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    for _ in range(2):
        keras.losses.Loss.__call__ = theirs
        model = distributed("sgd", Coupled())
        keras.losses.Loss.__call__ = original
        trained(model, shuffle=False)
        expected = trained(built("sgd", Coupled()), shuffle=False)
        pairs = zip(model.get_weights(), expected.get_weights(), strict=True)
        for ours, plain in pairs:
            np.testing.assert_allclose(ours, plain, rtol=2e-4, atol=1e-5)


PROGRAMS = {
    each.__name__: each
    for each in (
        fit_evaluate_predict,
        classes_of_users,
        central,
        sharded,
        run_eagerly,
        run_compiled,
        verify,
        save_and_load,
        two_threads,
        another_library_wraps_it_too,
        another_library_takes_its_own_off,
    )
} | {
    f"{error.__name__} in {where}": functools.partial(_failing, error, where)
    for error, where in (
        *((_StopError, where) for where in ("data", "layer", "callback")),
        (KeyboardInterrupt, "callback"),
    )
}


def left_by(name):
    """Returns the places that a program leaves different."""
    before = foreign.attributes(__name__)
    PROGRAMS[name]()
    for _ in range(3):  # graphs hold each other
        gc.collect()
    return foreign.differences(before, foreign.attributes(__name__))


def weights_beside(job):
    """Returns weights of a plain model, trained while a thread does a job."""
    model = built()
    in_threads(job, lambda: trained_in_order(model))
    return model.get_weights()


def neighbours():
    """Returns, for each job beside it, whether a plain model differs."""
    alone = weights_beside(lambda: None)
    model = distributed()
    jobs = {"fit": lambda: [trained_in_order(model) for _ in range(3)]}
    if BACKEND != "jax":
        # Keras on JAX can't train two models at once while one is traced.
        jobs["verify"] = verify
    return {
        name: [
            not np.array_equal(one, other)
            for one, other in zip(alone, weights_beside(job), strict=True)
        ]
        for name, job in jobs.items()
    }


def replaced_within():
    """Returns what is replaced in a step, but not in the tables."""
    before = foreign.attributes(__name__)
    found = set()

    class Looking(OwnLayer):
        def call(self, x):
            if not found:
                now = foreign.attributes(__name__)
                found.update(foreign.differences(before, now))
            return super().call(x)

    one = strategy(2)
    with one.scope():
        model = keras.Sequential([layers.Input((4,)), Looking()])
        model.compile("sgd", OwnCall(), jit_compile=False)
    trained(model)
    rows = [(foreign.name_of(row.owner), row) for row in HOOKS.rows()]
    known = {f"{owner}.{row.name}" for owner, row in rows}
    known |= {
        f"{owner}.__init_subclass__" for owner, row in rows if row.in_subclasses
    }
    # TensorFlow itself replaces it, while a thread watches operations.
    known.add("tensorflow.python.eager.execute.execute")
    assert len(found) > 20
    return sorted(
        place
        for place in found - known
        if place.split(".")[0] != __name__.split(".")[0]
    )


if __name__ == "__main__":
    trained(built()).evaluate(**DATA, verbose=0)  # what Keras makes once
    assert not HOOKS.count
    report = {"neighbours": neighbours()}
    gc.collect()
    report |= {name: left_by(name) for name in PROGRAMS}
    report["outside of the tables"] = replaced_within()
    json.dump(report, sys.stdout)
