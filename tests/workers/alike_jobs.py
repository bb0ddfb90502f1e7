"""What workers do in `test_alike.py`: most of it is not alike."""

import os
import types

import keras
import numpy as np

import keras_dist
from workers.jobs import attempted

LARGE = 5000  # numbers, more than a frame has room for


def mismatches():
    """Errors of exchanges that differ, and a sum after each of them."""
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    index = strategy.plan.cluster.index

    def alone(size):
        if not index:
            reduce(np.ones(size, "float32"))

    def reduce(value):
        return strategy.reduce("SUM", value, axis=None)

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

    square = np.ones((2, 2), "float32")
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
        "reductions": lambda: strategy.reduce(
            "MEAN" if index else "SUM", floats, axis=None
        ),
        "other reductions": lambda: strategy.reduce(
            "MAX" if index else "MIN", floats, axis=None
        ),
        "axes": lambda: strategy.reduce("SUM", square, axis=min(index, 1)),
        "keys": lambda: reduce({"b" if index else "a": floats}),
        "a function's shapes": lambda: run("SUM", size=3 + index),
        "a function's operations": lambda: run("MEAN" if index else "SUM"),
        "more in a function": lambda: run("SUM", *["SUM"] * min(index, 1)),
        "lines": lambda: reduce(floats) if index else gather(floats, floats),
        "all_reduce": lambda: strategy.run(
            lambda: keras_dist.get_replica_context().all_reduce(
                "MEAN" if index else "SUM", floats
            )
        ),
    }
    found = {}
    for name, case in cases.items():
        error = attempted(case)
        # A worker that calls nothing is found apart by the next call.
        is_error = isinstance(error, str)
        found[name] = error if is_error else attempted(reduce, floats)
        total = keras.ops.convert_to_numpy(reduce(floats))
        assert total.tolist() == [len(strategy.plan.cluster.addresses)] * 2
    return found


def model_of(activation="tanh"):
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation=activation),
            keras.layers.Dense(1),
        ]
    )


SETTINGS = types.SimpleNamespace(
    rate=1.0, table={"rate": 1.0}, array=np.ones(1), rank=0
)


def loss_by_attribute(y, prediction):
    return SETTINGS.rate * keras.ops.mean((y - prediction) ** 2, axis=-1)


def loss_by_key(y, prediction):
    table = SETTINGS.table
    return table["rate"] * keras.ops.mean((y - prediction) ** 2, axis=-1)


def loss_by_array(y, prediction):
    factor = SETTINGS.array[0]
    return factor * keras.ops.mean((y - prediction) ** 2, axis=-1)


class Scaled(keras.layers.Layer):
    def call(self, x):
        return SETTINGS.rate * x


class Shrinks(keras.regularizers.Regularizer):
    def __call__(self, x):
        return SETTINGS.rate * keras.ops.sum(x**2)


def loss_of(factor):
    def loss(y, prediction):
        return factor * keras.ops.mean((y - prediction) ** 2, axis=-1)

    return loss


def fingerprints():
    """Errors of workers that are about to compute different things."""
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    is_last = strategy.plan.cluster.index > 0
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")

    def fit(model=None, optimizer=None, loss="mse", **kwargs):
        with strategy.scope():
            model = model or model_of()
            model.compile(optimizer or keras.optimizers.SGD(0.1), loss)
        model.fit(x, y, batch_size=4, verbose=0, **kwargs)
        return model.get_weights()

    def layer():
        with strategy.scope():
            model = model_of("relu" if is_last else "tanh")
        return fit(model)

    def frozen():
        with strategy.scope():
            model = model_of()
        model.layers[0].trainable = not is_last
        return fit(model)

    def floatx():
        with strategy.scope():
            model = model_of()
            model.compile("sgd", "mse")
        keras.config.set_floatx("float64" if is_last else "float32")
        try:
            return attempted(model.fit, x, y)
        finally:
            keras.config.set_floatx("float32")

    def setting(make):
        SETTINGS.rate = SETTINGS.table["rate"] = rate
        SETTINGS.array = np.array([rate])
        try:
            return make()
        finally:
            SETTINGS.rate = SETTINGS.table["rate"] = 1.0
            SETTINGS.array = np.ones(1)

    def of_layer(layer):
        with strategy.scope():
            inner = layer()
            model = keras.Sequential([keras.Input((3,)), inner])
        return fit(model)

    def one_batch():
        with strategy.scope():
            model = model_of()
            model.compile(keras.optimizers.SGD(0.1, rate), "mse")
        return model.train_on_batch(x, y)

    def loop(optimizer):
        with strategy.scope():
            model = model_of()
            optimizer.build(model.trainable_variables)

        def loss():
            return keras.ops.mean(model(x) ** 2)

        @keras_dist.function
        def step():
            variables = model.trainable_variables
            value, gradients = keras_dist.value_and_grad(loss, variables)
            optimizer.apply(gradients, variables)
            return value

        # Workers compare a function that runs in another one, too.
        @keras_dist.function
        def train():
            return strategy.run(step)

        strategy.run(step)
        train()
        return model.get_weights()

    def other_step():
        if is_last:
            return strategy.run(lambda: keras.ops.ones(2))
        return strategy.run(lambda: keras.ops.ones(1))

    def other_model():
        with strategy.scope():
            models = [model_of(), model_of()]
        for model in models:
            model.compile("sgd", "mse")
        models[is_last].fit(x, y, verbose=0)

    adam, rate = keras.optimizers.Adam, 0.5 + 0.25 * is_last
    sgd = keras.optimizers.SGD
    stopping = keras.callbacks.EarlyStopping("loss")
    patient = keras.callbacks.EarlyStopping("loss", patience=1 + is_last)
    dense = keras.layers.Dense
    cases = {
        "attribute": lambda: setting(lambda: fit(loss=loss_by_attribute)),
        "key": lambda: setting(lambda: fit(loss=loss_by_key)),
        "array": lambda: setting(lambda: fit(loss=loss_by_array)),
        "read by a layer": lambda: setting(lambda: of_layer(Scaled)),
        "regularizer": lambda: setting(
            lambda: of_layer(lambda: dense(1, kernel_regularizer=Shrinks()))
        ),
        "a batch": one_batch,
        "loop": lambda: loop(sgd(0.1, momentum=rate)),
        "other step": other_step,
        "other model": other_model,
        "patience": lambda: fit(callbacks=[patient]),
        "activation": layer,
        "trainable": frozen,
        "floatx": floatx,
        "loss": lambda: fit(loss="mae" if is_last else "mse"),
        "loss of a function": lambda: fit(loss=loss_of(rate)),
        "beta_1": lambda: fit(optimizer=adam(0.1, beta_1=rate)),
        "clipnorm": lambda: fit(optimizer=adam(0.1, clipnorm=rate)),
        "callbacks": lambda: fit(callbacks=[stopping] * is_last),
    }
    found = {name: attempted(case) for name, case in cases.items()}
    # Names that Keras numbers, and what only a worker prints, don't count.
    if is_last:
        keras.layers.Dense(1)
    found["alike"] = fit()
    found["alike"] += loop(sgd(0.1, momentum=0.5))
    return found


def drifts():
    """Errors of workers whose variables have parted."""
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    index = strategy.plan.cluster.index
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    with strategy.scope():
        model = model_of()
        model.compile("sgd", "mse")
    weights = model.get_weights()

    def parts(epoch, logs):
        model.layers[0].kernel.assign_add(np.full((3, 4), 0.5 * index))

    def loop():
        model.set_weights([each + index for each in weights])
        strategy.run(lambda: model(x[:2]))

    def loop_alike():
        model.set_weights(weights)
        return len(strategy.run(lambda: model(x[:2])))

    callback = keras.callbacks.LambdaCallback(on_epoch_end=parts)
    fit = {"batch_size": 4, "verbose": 0}
    found = {
        "loop": attempted(loop),
        "loop alike": attempted(loop_alike),
        "epoch": attempted(
            lambda: model.fit(x, y, epochs=2, callbacks=[callback], **fit)
        ),
    }

    def not_a_number(epoch, logs):
        if index:
            model.layers[0].kernel.assign(np.full((3, 4), np.nan))

    callback = keras.callbacks.LambdaCallback(on_epoch_end=not_a_number)
    found["no number"] = attempted(
        lambda: model.fit(x, y, epochs=2, callbacks=[callback], **fit)
    )
    model.set_weights(weights)

    def at_the_end(logs):
        model.layers[0].kernel.assign_add(np.full((3, 4), 0.5 * index))

    with strategy.scope():
        beta = keras.Variable(1.0)
        other = model_of()
    other.compile("sgd", lambda y, pred: beta * keras.ops.abs(y - pred))

    def beta_of_the_chief(epoch, logs):
        if not index:
            beta.assign(2.0)

    callback = keras.callbacks.LambdaCallback(on_epoch_begin=beta_of_the_chief)
    found["outside"] = attempted(
        lambda: other.fit(x, y, callbacks=[callback], **fit)
    )
    callback = keras.callbacks.LambdaCallback(on_train_end=at_the_end)
    found["end"] = attempted(
        lambda: model.fit(x, y, callbacks=[callback], **fit)
    )
    found["fit"] = model.fit(x, y, **fit).history["loss"]
    return found


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


def alike(folder):
    """What a model learns where workers differ in what doesn't count."""
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    index = strategy.plan.cluster.index
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                OwnSettings(),
                keras.layers.Dense(4, activation=lambda x: 2.0 * x),
                keras.layers.Dense(1),
            ]
        )
    shape = model.predict(x, verbose=0).shape  # before `compile`
    model.compile("sgd", "mse")
    callbacks = [keras_dist.on_chief(keras.callbacks.TerminateOnNaN())]
    if index:
        model.fit(x, y, verbose=0, callbacks=callbacks)
    else:
        path = os.path.join(folder, "log.csv")
        log = keras.callbacks.CSVLogger(path)
        model.fit(x, y, verbose=0, callbacks=[*callbacks, log])
    model.set_weights([each + 0.5 for each in model.get_weights()])

    @keras_dist.function
    def run():
        part = strategy.run(lambda: keras.ops.sum(model(x)))
        return strategy.reduce("SUM", part, axis=None)

    return shape, float(run()), model.get_weights()


WAYS = {
    "method": lambda model, path: model.save(path),
    "function": lambda model, path: keras.saving.save_model(model, path),
    "weights": lambda model, path: keras.saving.save_weights(
        model, path.replace(".keras", ".weights.h5")
    ),
    "part": lambda model, path: model.layers[1].save(path),
}


def saves(folder):
    """Who has written, and whether it was there in the next line."""
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    index = strategy.plan.cluster.index
    with strategy.scope():
        inner = model_of()
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(3), inner]
        )
        model.compile("sgd", "mse")
    found = {}
    if not index:  # it waits for nobody
        model.save(os.path.join(folder, "alone.keras"))
    for name, way in WAYS.items():
        own = os.path.join(folder, f"{name}-{index}.keras")
        chiefs = os.path.join(folder, f"{name}-0.keras")
        way(model, own)
        ended = [
            path.replace(".keras", end)
            for path in (own, chiefs)
            for end in (".keras", ".weights.h5")
        ]
        found[name] = [os.path.exists(path) for path in ended]
    return found
