"""Workers are alike, or an error on all of them says what differs."""

import os
import types

import keras
import numpy as np
import pytest

import keras_dist
from workers.clusters import on_workers
from workers.jobs import attempted

LARGE = 5000  # numbers, more than a frame has room for
X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


@pytest.mark.parametrize("shape", [(2, 1), (3, 1)])
@on_workers()
def test_exchanges_that_differ_are_told_with_their_lines(shape):
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    index = strategy.plan.cluster.index

    def alone(size):
        if not index:
            reduce(np.ones(size, "float32"))

    def reduce(value, op="SUM"):
        return strategy.reduce(op, value, axis=None)

    def gather(*values):
        return strategy.gather(values[min(index, 1)], axis=0)

    floats, integers = np.ones(2, "float32"), np.ones(2, "int32")
    replica = keras_dist.get_replica_context

    def run(*reductions, size=2):
        @keras_dist.function
        def compiled():
            ones = keras.ops.ones(size)
            return [replica().all_reduce(op, ones) for op in reductions]

        return strategy.experimental_local_results(strategy.run(compiled))

    op, square = "MEAN" if index else "SUM", np.ones((2, 2), "float32")
    cases = {
        "reduce on the chief": lambda: alone(1),
        "a large reduce on the chief": lambda: alone(LARGE),
        "dtypes": lambda: gather(floats, integers),
        "ranks": lambda: gather(floats, floats[None]),
        "columns": lambda: gather(np.ones((2, 3)), np.ones((2, 4))),
        "shapes": lambda: reduce(np.ones(3 + index, "float32")),
        "large shapes": lambda: reduce(np.ones(LARGE + index, "float32")),
        "a large and a small one": lambda: reduce(
            np.ones(LARGE if index else 2, "float32")
        ),
        "reductions": lambda: reduce(floats, op),
        "other reductions": lambda: reduce(floats, "MAX" if index else "MIN"),
        "axes": lambda: strategy.reduce("SUM", square, axis=min(index, 1)),
        "keys": lambda: reduce({"b" if index else "a": floats}),
        "a function's shapes": lambda: run("SUM", size=3 + index),
        "a function's operations": lambda: run(op),
        "more in a function": lambda: run("SUM", *["SUM"] * min(index, 1)),
        "lines": lambda: reduce(floats) if index else gather(floats, floats),
        "all_reduce": lambda: strategy.run(
            lambda: replica().all_reduce(op, floats)
        ),
    }
    for name, case in cases.items():
        error = attempted(case)
        if not isinstance(error, str):
            # A worker that calls nothing is found apart by the next call.
            error = attempted(reduce, floats)
        apart = "ReplicaDivergenceError: Workers are at different calls"
        assert error.startswith(apart), (name, error)
        # Of a compiled function, the program is named.
        lines = error.count("test_alike.py:")
        assert lines + error.count("function `compiled`") >= 2, (name, error)
        assert f"worker {shape[0] - 1} at" in error, (name, error)
        total = keras.ops.convert_to_numpy(reduce(floats))
        assert total.tolist() == [shape[0]] * 2


def model_of(activation="tanh"):
    keras.utils.set_random_seed(3)
    first = keras.layers.Dense(4, activation=activation)
    return keras.Sequential([keras.Input((3,)), first, keras.layers.Dense(1)])


SETTINGS = types.SimpleNamespace(
    rate=1.0, table={"rate": 1.0}, array=np.ones(1)
)


def error_of(y, prediction):
    return keras.ops.mean((y - prediction) ** 2, axis=-1)


def loss_by_attribute(y, prediction):
    return SETTINGS.rate * error_of(y, prediction)


def loss_by_key(y, prediction):
    table = SETTINGS.table
    return table["rate"] * error_of(y, prediction)


def loss_by_array(y, prediction):
    factor = SETTINGS.array[0]
    return factor * error_of(y, prediction)


class Scaled(keras.layers.Layer):
    def call(self, x):
        return SETTINGS.rate * x


class Shrinks(keras.regularizers.Regularizer):
    def __call__(self, x):
        return SETTINGS.rate * keras.ops.sum(x**2)


def loss_of(factor):
    def loss(y, prediction):
        return factor * error_of(y, prediction)

    return loss


class Computations:
    """What a worker computes; the last one's are others.

    Args:
        strategy: The strategy of all workers.
    """

    def __init__(self, strategy):
        self.strategy = strategy
        self.is_last = strategy.plan.cluster.index > 0
        self.rate = 0.5 + 0.25 * self.is_last

    def fit(self, make=model_of, optimizer=None, loss="mse", **kwargs):
        with self.strategy.scope():
            model = make()
            model.compile(optimizer or keras.optimizers.SGD(0.1), loss)
        model.fit(X, Y, batch_size=4, verbose=0, **kwargs)
        return model.get_weights()

    def of_layer(self, inner):
        return self.fit(lambda: keras.Sequential([keras.Input((3,)), inner()]))

    def with_setting(self, fit, *args, **kwargs):
        SETTINGS.rate = SETTINGS.table["rate"] = self.rate
        SETTINGS.array = np.array([self.rate])
        try:
            return fit(*args, **kwargs)
        finally:
            SETTINGS.rate = SETTINGS.table["rate"] = 1.0
            SETTINGS.array = np.ones(1)

    def frozen(self):
        model = model_of()
        model.layers[0].trainable = not self.is_last
        return model

    def floatx(self):
        with self.strategy.scope():
            model = model_of()
            model.compile("sgd", "mse")
        keras.config.set_floatx("float64" if self.is_last else "float32")
        try:
            return model.fit(X, Y, verbose=0)
        finally:
            keras.config.set_floatx("float32")

    def one_batch(self):
        with self.strategy.scope():
            model = model_of()
            model.compile(keras.optimizers.SGD(0.1, self.rate), "mse")
        return model.train_on_batch(X, Y)

    def loop(self, optimizer):
        with self.strategy.scope():
            model = model_of()
            optimizer.build(model.trainable_variables)

        def loss():
            return keras.ops.mean(model(X) ** 2)

        @keras_dist.function
        def step():
            variables = model.trainable_variables
            value, gradients = keras_dist.value_and_grad(loss, variables)
            optimizer.apply(gradients, variables)
            return value

        # Workers compare a function that runs in another one, too.
        @keras_dist.function
        def train():
            return self.strategy.run(step)

        self.strategy.run(step)
        train()
        return model.get_weights()

    def other_step(self):
        if self.is_last:
            return self.strategy.run(lambda: keras.ops.ones(2))
        return self.strategy.run(lambda: keras.ops.ones(1))

    def other_model(self):
        with self.strategy.scope():
            models = [model_of(), model_of()]
        for model in models:
            model.compile("sgd", "mse")
        models[self.is_last].fit(X, Y, verbose=0)


@on_workers()
def test_other_computations_are_told_before_they_begin():
    made = Computations(keras_dist.MultiWorkerMirroredStrategy())
    fit, setting, is_last, rate = (
        *(made.fit, made.with_setting, made.is_last, made.rate),
    )
    adam, sgd = keras.optimizers.Adam, keras.optimizers.SGD
    stopping = keras.callbacks.EarlyStopping("loss")
    patient = keras.callbacks.EarlyStopping("loss", patience=1 + is_last)
    dense = keras.layers.Dense
    by_rate = "'rate': 0.75"
    momentum = "momentum: 0.5 on worker 0, 0.75 on worker 1"
    cases = {
        by_rate: [
            lambda: setting(fit, loss=loss_by_attribute),
            lambda: setting(fit, loss=loss_by_key),
            lambda: setting(
                made.of_layer, lambda: dense(1, kernel_regularizer=Shrinks())
            ),
        ],
        "float64[1]": [lambda: setting(fit, loss=loss_by_array)],
        "SETTINGS: {'rate': 0.5} on worker 0": [
            lambda: setting(made.of_layer, Scaled)
        ],
        momentum: [made.one_batch],
        f"`optimizer`: {momentum}": [
            lambda: made.loop(sgd(0.1, momentum=rate))
        ],
        "Computations.other_step.<locals>.<lambda>`": [made.other_step],
        # Workers fit the same model.
        "of this process) on worker 0": [made.other_model],
        "'patience': 2": [lambda: fit(callbacks=[patient])],
        "activation: 'tanh' on worker 0, 'relu' on worker 1": [
            lambda: fit(lambda: model_of("relu" if is_last else "tanh"))
        ],
        "trainable: True on worker 0, False on worker 1": [
            lambda: fit(made.frozen)
        ],
        "floatx: float32 on worker 0, float64 on worker 1": [made.floatx],
        "compile(loss=...): 'mse' on worker 0, 'mae' on worker 1": [
            lambda: fit(loss="mae" if is_last else "mse")
        ],
        "0.5": [lambda: fit(loss=loss_of(rate))],
        "beta_1: 0.5 on worker 0, 0.75 on worker 1": [
            lambda: fit(optimizer=adam(0.1, beta_1=rate))
        ],
        "clipnorm: 0.5 on worker 0, 0.75 on worker 1": [
            lambda: fit(optimizer=adam(0.1, clipnorm=rate))
        ],
        "EarlyStopping({'baseline'": [
            lambda: fit(callbacks=[stopping] * is_last)
        ],
    }
    for told, programs in cases.items():
        for program in programs:
            error = attempted(program)
            compute = "ReplicaDivergenceError: Workers are about to compute"
            assert error.startswith(compute), (told, error)
            assert told in error, (told, error)
    # Names that Keras numbers, and what only a worker prints, don't count.
    if is_last:
        dense(1)
    return fit(), made.loop(sgd(0.1, momentum=0.5))


class Parting:
    """A fit in which the variables of workers part."""

    def __init__(self, strategy):
        self.strategy, self.index = strategy, strategy.plan.cluster.index
        with strategy.scope():
            self.model = model_of()
            self.model.compile("sgd", "mse")
            self.beta = beta = keras.Variable(1.0)
            self.other = model_of()
        self.other.compile(
            "sgd", lambda y, pred: beta * keras.ops.abs(y - pred)
        )
        self.weights = self.model.get_weights()

    def fit(self, model, epochs=1, **hooks):
        callbacks = [keras.callbacks.LambdaCallback(**hooks)]
        return model.fit(
            X, Y, 4, epochs=epochs, callbacks=callbacks, verbose=0
        ).history["loss"]

    def add(self, *_):
        kernel = self.model.layers[0].kernel
        kernel.assign_add(np.full((3, 4), 0.5 * self.index))

    def spoil(self, *_):
        if self.index:
            self.model.layers[0].kernel.assign(np.full((3, 4), np.nan))

    def of_the_chief(self, *_):
        if not self.index:
            self.beta.assign(2.0)

    def loop(self, by=0):
        self.model.set_weights([each + by for each in self.weights])
        return len(self.strategy.run(lambda: self.model(X[:2])))


@on_workers()
def test_variables_that_part_are_found():
    made = Parting(keras_dist.MultiWorkerMirroredStrategy())
    fit, model = made.fit, made.model
    error = attempted(made.loop, made.index)
    assert "other values before `run`" in error
    assert "by 1 on worker 1" in error
    assert made.loop() == 2
    error = attempted(lambda: fit(model, 2, on_epoch_end=made.add))
    assert "at the end of an epoch" in error
    assert "kernel' by 0.5 on worker 1" in error
    error = attempted(lambda: fit(model, 2, on_epoch_end=made.spoil))
    assert "kernel' by inf on worker 1" in error
    model.set_weights(made.weights)
    # A variable outside of the model.
    hooks = {"on_epoch_begin": made.of_the_chief}
    error = attempted(lambda: fit(made.other, **hooks))
    assert "at the end of an epoch" in error
    assert "by 1 on worker 1" in error
    error = attempted(lambda: fit(model, on_train_end=made.add))
    assert "other values at the end of `fit`" in error
    # `fit` begins with the chief's values.
    return fit(model)


class OwnSettings(keras.layers.Layer):
    """A layer with attributes that its computation doesn't read."""

    def __init__(self):
        super().__init__()
        index = int(os.environ["KERAS_DIST_WORKER_INDEX"])
        self.folder = f"logs/{index}"
        self.started = float(index)
        self.scale = 2.0

    def call(self, x):
        return self.scale * x


@pytest.mark.parametrize("shape", [(2, 1), (3, 1)])
@on_workers()
def test_workers_may_differ_in_what_does_not_count(shape, tmp_path):
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        dense = keras.layers.Dense(4, activation=lambda x: 2.0 * x)
        model = keras.Sequential(
            [keras.Input((3,)), OwnSettings(), dense, keras.layers.Dense(1)]
        )
    assert model.predict(X, verbose=0).shape == (8, 1)  # before `compile`
    model.compile("sgd", "mse")
    callbacks = [keras_dist.on_chief(keras.callbacks.TerminateOnNaN())]
    if strategy.plan.cluster.index == 0:
        callbacks.append(keras.callbacks.CSVLogger(tmp_path / "log.csv"))
    model.fit(X, Y, verbose=0, callbacks=callbacks)
    model.set_weights([each + 0.5 for each in model.get_weights()])

    @keras_dist.function
    def run():
        part = strategy.run(lambda: keras.ops.sum(model(X)))
        return strategy.reduce("SUM", part, axis=None)

    return float(run()), model.get_weights()


WAYS = {
    "method": lambda model, path: model.save(path),
    "function": lambda model, path: keras.saving.save_model(model, path),
    "weights": lambda model, path: keras.saving.save_weights(
        model, path.with_suffix(".weights.h5")
    ),
    "part": lambda model, path: model.layers[1].save(path),
}


@pytest.mark.parametrize("way", WAYS)
@on_workers()
def test_the_chief_saves_and_the_others_wait(way, tmp_path):
    """The chief's file is there in the next line, and no other one."""
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    index = strategy.plan.cluster.index
    with strategy.scope():
        first = keras.layers.Dense(3)
        model = keras.Sequential([keras.Input((3,)), first, model_of()])
        model.compile("sgd", "mse")
    if not index:  # it waits for nobody
        model.save(tmp_path / "alone.keras")
    WAYS[way](model, tmp_path / f"{index}.keras")
    name = "0.weights.h5" if way == "weights" else "0.keras"
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"alone.keras", name}
