"""One small trial for each row of README's table of what works where.

A probe tries the feature on the backend in use, asserts its numbers, and
returns the text of the cell. What a table can't say is in README's text.
"""

import contextlib
import functools
import warnings

import grain
import keras
import numpy as np

import keras_dist
from docs.probe_workers import sends_gradients_in_16_bits
from docs.probe_workers import trains_on_logical_devices
from docs.probe_workers import trains_on_workers
from docs.probe_workers import trains_with_parts
from keras_versions import TAKES_SEVERAL_STEPS

YES = "yes"
REFUSED = "no: an error says so"
X = np.linspace(-1.0, 1.0, 22, dtype="float32").reshape(11, 2)
Y = X.sum(axis=1, keepdims=True) ** 2


def mirrored(**options):
    return keras_dist.MirroredStrategy(["cpu:0", "cpu:1"], **options)


def _model(**settings):
    model = keras.Sequential(
        [
            keras.layers.Input((2,)),
            keras.layers.Dense(4, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    model.set_weights(
        [
            np.linspace(0.1, 1.0, w.numpy().size).reshape(w.shape)
            for w in model.weights
        ]
    )
    optimizer = keras.optimizers.Adam(0.05, global_clipnorm=0.5)
    model.compile(optimizer, "mse", **{"metrics": ["mae"], **settings})
    return model


def _weights(strategy=None):
    scope = strategy.scope() if strategy else contextlib.nullcontext()
    with scope:
        model = _model(jit_compile=False)
    model.fit(X, Y, batch_size=11, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


_plain = functools.cache(_weights)


def _as_one_device(make):
    try:
        found = _weights(make())
    except (ValueError, NotImplementedError) as error:
        assert "Received" in str(error)
        return REFUSED
    for ours, plain in zip(found, _plain(), strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-5)
    return YES


def one_device():
    return _as_one_device(lambda: keras_dist.OneDeviceStrategy("cpu:1"))


def several_devices():
    return _as_one_device(mirrored)


def central():
    return _as_one_device(
        lambda: keras_dist.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2")
    )


def sharded():
    return _as_one_device(lambda: mirrored(optimizer_state="sharded"))


def sharded_variables():
    return _as_one_device(lambda: mirrored(variables="sharded"))


def logical_devices():
    layout_map = {".*/kernel": ("logical",)}
    return _as_one_device(
        lambda: keras_dist.MirroredStrategy(
            [f"cpu:{index}" for index in range(4)],
            logical_devices=2,
            layout_map=layout_map,
        )
    )


def stand_in():
    resolver = keras_dist.cluster_resolver.TPUClusterResolver("virtual")
    return _as_one_device(lambda: keras_dist.TPUStrategy(resolver))


def tpus():
    try:
        keras_dist.TPUStrategy()
    except keras_dist.DeviceError as error:
        return "not tested" if "no TPU here" in str(error) else REFUSED
    return YES


def devices_of_their_own():
    def device():
        names.add(str(keras.ops.ones(()).device))

    names = set()
    mirrored().run(device)
    return YES if len(names) == 2 else "no: the framework has one CPU device"


def evaluate_predict_and_save(folder):
    with mirrored().scope():
        model = _model(jit_compile=False)
    loss = model.evaluate(X, Y, batch_size=7, verbose=0)[0]
    predicted = model.predict(X, batch_size=7, verbose=0)
    np.testing.assert_allclose(loss, ((predicted - Y) ** 2).mean(), rtol=1e-5)
    model.save(folder / "m.keras")
    again = keras.models.load_model(folder / "m.keras")
    np.testing.assert_array_equal(
        again.get_weights()[0], model.get_weights()[0]
    )
    return YES


def saves_in_parts(folder):
    with mirrored().scope():
        model, again = _model(jit_compile=False), _model(jit_compile=False)
    again.set_weights([0 * weight for weight in model.get_weights()])
    try:
        keras_dist.save_sharded(model, folder / "parts")
    except keras_dist.UnsupportedModelError:
        return REFUSED
    keras_dist.restore_sharded(again, folder / "parts")
    np.testing.assert_array_equal(
        again.get_weights()[0], model.get_weights()[0]
    )
    return YES


def jit_compile():
    class Counted(keras.layers.Layer):
        def call(self, x):
            calls.append(1)
            return x

    calls = []
    with mirrored().scope():
        model = keras.Sequential([Counted(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=True)
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        model.fit(X, Y, batch_size=4, verbose=0)
        before = len(calls)
        model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    if any("jit_compile" in str(notice.message) for notice in notices):
        return "off: a notice says so"
    return YES if len(calls) == before else "accepted, but runs as Python"


def steps_per_execution():
    with mirrored().scope():
        model = _model(jit_compile=False, steps_per_execution=2)
    try:
        model.fit(X, Y, batch_size=4, verbose=0)
        works = True
    except ValueError:
        works = False
    assert works == TAKES_SEVERAL_STEPS
    return "from Keras 3.16" if keras.backend.backend() == "torch" else YES


def run_reduce_gather():
    def replica_fn():
        context = keras_dist.get_replica_context()
        own = keras.ops.ones((1,)) * (context.replica_id_in_sync_group + 1)
        return own, context.all_reduce("SUM", own)

    strategy = mirrored()
    own, total = strategy.run(replica_fn)
    assert float(strategy.reduce("MEAN", own, axis=0)) == 1.5
    assert keras.ops.convert_to_numpy(strategy.gather(total, 0)).tolist() == [
        3,
        3,
    ]
    return YES


def derivatives():
    def replica_fn():
        def loss_fn():
            context = keras_dist.get_replica_context()
            return context.all_reduce("SUM", variable * variable) * 2.0

        return keras_dist.gradient(loss_fn, [variable])[0]

    strategy = mirrored()
    with strategy.scope():
        variable = keras.Variable(3.0)
    first, _ = strategy.experimental_local_results(strategy.run(replica_fn))
    # Each of two replicas has a sum of both in its loss.
    assert float(first) == 24.0
    return YES


def _python_calls(run):
    calls = []
    strategy = mirrored()
    with strategy.scope():
        variable = keras.Variable(1.0)

    def step(x):
        calls.append(1)
        return keras.ops.sum(x) * variable

    run(strategy, step, calls.clear)
    return len(calls)


def compiled_functions():
    def runs(strategy, step, forget):
        compiled = keras_dist.function(step)
        strategy.run(compiled, (X,))
        forget()
        strategy.run(compiled, (X,))

    return "compiled" if not _python_calls(runs) else "runs as Python"


def scanned_steps():
    def runs(strategy, step, forget):
        data = strategy.experimental_distribute_dataset([X[:4]] * 6)
        keras_dist.scan_steps(step, iter(data), steps=6)

    calls = _python_calls(runs)
    return "compiled" if calls < 6 else "a Python loop"


def random_draws():
    def trained(strategy=None):
        keras.utils.set_random_seed(3)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential(
                [
                    keras.Input(X.shape[1:]),
                    keras.layers.GaussianNoise(0.2),
                    keras.layers.Dense(8),
                    keras.layers.Dropout(0.3),
                    keras.layers.Dense(1),
                ]
            )
            model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=7, verbose=0)
        return model.get_weights()

    for own, expected in zip(trained(mirrored()), trained(), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
    return YES


def own_train_step():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data

            def loss_fn():
                return self.compute_loss(x, y, self(x, training=True))

            loss, gradients = keras_dist.value_and_grad(
                loss_fn, self.trainable_variables
            )
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    with mirrored().scope():
        model = Own()
        model.compile("sgd", "mse", jit_compile=False)
        model(X)
    model.fit(X, Y, batch_size=11, verbose=0)
    error = X.sum(axis=1, keepdims=True) - Y
    expected = 1 - 0.01 * 2 * (error * X).mean(axis=0)
    np.testing.assert_allclose(
        model.get_weights()[0][:, 0], expected, rtol=1e-5
    )
    return YES


class _Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[4 * index : 4 * index + 4]


def data_kinds():
    kinds = [
        _Batches(),
        grain.MapDataset.source(X).batch(4),
        [X[:4], X[4:8], X[8:]],
        (X[i : i + 4] for i in (0, 4, 8)),
    ]
    strategy = mirrored()
    for data in kinds:
        dataset = strategy.experimental_distribute_dataset(data)
        batches = [
            np.concatenate(
                [
                    keras.ops.convert_to_numpy(part)
                    for part in strategy.experimental_local_results(batch)
                ]
            )
            for batch in dataset
        ]
        np.testing.assert_array_equal(np.concatenate(batches), X)
    return YES


def stateful_layers():
    with mirrored().scope():
        model = keras.Sequential(
            [
                keras.layers.Input((1, 2), batch_size=4),
                keras.layers.SimpleRNN(1, stateful=True),
            ]
        )
        model.compile("sgd", "mse", jit_compile=False)
    try:
        model.fit(X[:4, None], Y[:4], batch_size=4, verbose=0)
    except keras_dist.UnsupportedModelError:
        return REFUSED
    return YES


def older_names():
    strategy = keras_dist.compat.v1.MirroredStrategy(["cpu:0", "cpu:1"])
    assert (
        float(strategy.reduce("SUM", keras_dist.PerReplica([1.0, 2.0]))) == 3.0
    )
    with strategy.scope():
        variable = keras.Variable(1.0)
    strategy.extended.update(variable, lambda v, x: v.assign_add(x), (2.0,))
    assert float(variable) == 3.0
    ops = keras_dist.ReductionToOneDevice()
    keras_dist.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
    return YES


PROBES = {
    "`OneDeviceStrategy`": one_device,
    "`MirroredStrategy`": several_devices,
    '`MirroredStrategy(optimizer_state="sharded")`': sharded,
    '`MirroredStrategy(variables="sharded")`': sharded_variables,
    "`MirroredStrategy(logical_devices=2, layout_map=...)`": logical_devices,
    "`CentralStorageStrategy`": central,
    "`MultiWorkerMirroredStrategy`, two processes": trains_on_workers,
    '`MultiWorkerMirroredStrategy(optimizer_state="sharded")`': (
        functools.partial(trains_with_parts, "optimizer_state")
    ),
    '`MultiWorkerMirroredStrategy(variables="sharded")`': functools.partial(
        trains_with_parts, "variables"
    ),
    "`MultiWorkerMirroredStrategy(logical_devices=2, layout_map=...)`": (
        trains_on_logical_devices
    ),
    "`TPUStrategy` with CPU devices in place of a TPU": stand_in,
    "`TPUStrategy` on a TPU": tpus,
    "virtual CPU devices that are separate devices": devices_of_their_own,
    "`evaluate`, `predict`, `save`": evaluate_predict_and_save,
    "`save_sharded`, `restore_sharded`": saves_in_parts,
    "`compile(jit_compile=True)`": jit_compile,
    "`compile(steps_per_execution=2)`": steps_per_execution,
    "your own `train_step(self, data)` in `fit`": own_train_step,
    "dropout, noise, augmentation in `fit`: the numbers of one device": (
        random_draws
    ),
    "recurrent layers with `stateful=True`": stateful_layers,
    "`run`, `reduce`, `gather`, collectives": run_reduce_gather,
    "derivatives, also through collectives": derivatives,
    "`function`": compiled_functions,
    "`scan_steps`": scanned_steps,
    "data: PyDataset, grain, lists, generators": data_kinds,
    "`extended`, `CrossDeviceOps`, `compat.v1`": older_names,
    '`CommunicationOptions(dtype="float16")`': sends_gradients_in_16_bits,
}
