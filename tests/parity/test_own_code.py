"""The user's code runs once in each replica, and has one device's numbers."""

import types
import warnings
from collections import Counter

import keras
import numpy as np
import pytest
from keras import layers
from keras import ops

import keras_dist
from parity import models
from parity.harness import BACKEND
from parity.harness import JIT
from parity.harness import PLAIN_ONLY
from parity.harness import assert_same
from parity.harness import compile_mode
from parity.harness import compiled
from parity.harness import fitted
from parity.harness import flat
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import state_of

FIT = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
EVALUATE = {"batch_size": 8, "verbose": 0, "return_dict": True}
SEES_ALL_ROWS = BACKEND == "jax" or PLAIN_ONLY
ON_REPLICAS = pytest.mark.skipif(
    SEES_ALL_ROWS, reason="On JAX, a step has the rows of all replicas."
)

calls = Counter()


class Layer(layers.Layer):
    """Treats each row alone, and adds and assigns on the way."""

    def build(self, shape):
        self.seen = self.add_weight(
            shape=(), initializer="zeros", trainable=False, aggregation="sum"
        )

    def call(self, x):
        calls["layer"] += 1
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        self.seen.assign_add(ops.sum(ops.ones_like(x[:, 0])))
        return x

    def compute_output_shape(self, shape):
        return shape


class Loss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        calls["loss"] += 1
        return ops.mean(ops.square(y_true - y_pred), axis=-1)


class Metric(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        calls["update_state"] += 1
        error = ops.abs(ops.subtract(y_true, y_pred))
        return super().update_state(error, sample_weight)


class Model(keras.Model):
    def train_step(self, *args):
        calls["train_step"] += 1
        return super().train_step(*args)

    def test_step(self, *args):
        calls["test_step"] += 1
        return super().test_step(*args)

    def predict_step(self, *args):
        calls["predict_step"] += 1
        return super().predict_step(*args)

    def compute_loss(self, *args, **kwargs):
        calls["compute_loss"] += 1
        return super().compute_loss(*args, **kwargs)


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        calls["__getitem__"] += 1
        rows = slice(8 * index, 8 * index + 8)
        return tuple(models.table(24)[name][rows] for name in ("x", "y"))


class Callback(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        calls["callback"] += 1


def _model(count, cls=Model, layer=Layer, loss=Loss, metric=Metric, **options):
    with scope(count):
        inputs = keras.Input((4,))
        hidden = layer()(inputs) if layer else inputs
        model = cls(inputs, layers.Dense(1)(hidden))
        set_initial_weights(model)
        for variable in model.non_trainable_variables:
            variable.assign(ops.zeros(variable.shape, variable.dtype))
        model.compile(
            keras.optimizers.SGD(0.05),
            loss() if loss else "mse",
            metrics=[metric()] if metric else None,
            **options,
        )
    return model


def _calls_of(model, run):
    calls.clear()
    run(model)
    return dict(calls)


def _batch():
    data = Data()[0]
    calls["__getitem__"] -= 1
    return data


RUNS = {
    "fit": lambda model: model.fit(
        Data(), epochs=2, verbose=0, callbacks=[Callback()]
    ),
    "evaluate": lambda model: model.evaluate(Data(), verbose=0),
    "predict": lambda model: model.predict(Data(), verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(*_batch()),
}


@ON_REPLICAS
@pytest.mark.parametrize("name", RUNS)
def test_it_runs_as_often_as_the_program_says(name):
    """Once in each replica, where one device runs it once.

    Metrics get the rows of all replicas together.
    """
    eager = {"run_eagerly": True}
    # The first run builds.
    one, ours = _model(None, **eager), _model(2, **eager)
    RUNS[name](one), RUNS[name](ours)
    plain, actual = _calls_of(one, RUNS[name]), _calls_of(ours, RUNS[name])
    once = ("callback", "__getitem__", "update_state")
    expected = {k: n * (1 if k in once else 2) for k, n in plain.items()}
    assert actual == expected


@ON_REPLICAS
def test_the_first_step_is_a_step_as_any_other():
    model = _model(2, metric=None, run_eagerly=True)
    plain = _model(None, metric=None, run_eagerly=True)
    found, alone = (
        _calls_of(each, lambda model: model.fit(Data(), verbose=0))
        for each in (model, plain)
    )
    assert found["train_step"] == 2 * alone["train_step"] == 6
    # Keras calls a model's methods once to build it; on TensorFlow only if
    # the model has a strategy, any.
    for name in ("layer", "compute_loss", "loss"):
        more = found[name] - 2 * 3
        assert more in (alone[name] - 3, 1 if BACKEND == "tensorflow" else 0)


def _told(run):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    own = keras_dist.ReplicaCodeWarning
    return [str(w.message) for w in seen if issubclass(w.category, own)]


@ON_REPLICAS
def test_it_is_told_of_once_by_name():
    model = _model(2)

    def run():
        model.fit(**models.table(16), **FIT)
        model.evaluate(**models.table(16), verbose=0)

    code, number = _told(run)
    for name in ("`train_step`", "`test_step`", "`compute_loss`", "(Layer)"):
        assert name in code
    assert "strategy.verify(model, x, y)" in code
    assert "adds a number" in number


def test_what_is_of_keras_is_not_told_of():
    model = _model(2, cls=keras.Model, layer=None)
    assert not _told(lambda: model.fit(**models.table(16), **FIT))


OPERATIONS = {
    "mean": lambda x: x - ops.mean(x, axis=0, keepdims=True),
    "softmax": lambda x: ops.softmax(x, axis=0),
    "flip": lambda x: ops.flip(x, axis=0),
    "matmul": lambda x: ops.matmul(ops.matmul(x, ops.transpose(x)), x),
    "cumsum": lambda x: ops.cumsum(x, axis=-2),
}
OF_ROWS = {
    "softmax": lambda x: ops.softmax(x, axis=-1),
    "squares": lambda x: ops.square(x) + 1.0,
    "concatenate": lambda x: ops.concatenate([x, x], axis=1),
    "sum": lambda x: x * ops.sum(x, axis=1, keepdims=True),
    "reshape": lambda x: ops.reshape(x, (-1, 2, 2))[:, 0],
}


def _told_of(operation):
    with scope(2):
        inputs = keras.Input((4,))
        model = keras.Model(inputs, layers.Dense(1)(operation(inputs)))
    return _told(lambda: model.predict(np.ones((4, 4)), verbose=0))


@ON_REPLICAS
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_that_combine_rows_are_told_of(name):
    (told,) = _told_of(OPERATIONS[name])
    assert f"operation '{name}" in told


@pytest.mark.parametrize("name", OF_ROWS)
def test_operations_of_each_row_are_not_told_of(name):
    assert not _told_of(OF_ROWS[name])


@ON_REPLICAS
def test_a_method_of_the_instance_is_found():
    model = _model(2, cls=keras.Model, layer=None)

    def compute_loss(self, x, y, y_pred, sample_weight=None, **options):
        return ops.mean(ops.abs(y - y_pred))

    model.compute_loss = types.MethodType(compute_loss, model)
    (told,) = _told(lambda: model.fit(**models.table(16), **FIT))
    assert "`compute_loss`" in told


@ON_REPLICAS
def test_what_verify_found_equal_is_not_told_of():
    class Rows(layers.Layer):
        def call(self, x):
            return ops.tanh(x)

    model = compiled(2, models.sequence(Rows, models.dense()))
    strategy = model.layers[-1].kernel.distribute_strategy
    data = models.table(16)
    assert not _told(lambda: strategy.verify(model, **data))
    assert not _told(lambda: model.fit(**data, **FIT))


def _steps_of_the_instance(count):
    """A model whose step is replaced after it was compiled."""
    model = _model(count, cls=keras.Model, layer=None)
    rows = []

    def test_step(data):
        rows.append(data[0].shape[0])
        return type(model).test_step(model, data)

    model.test_step = test_step
    logs = model.evaluate(**models.table(16), **EVALUATE)
    return flat("evaluate", logs), rows


@ON_REPLICAS
def test_a_step_of_the_instance_runs_on_replicas():
    (ours, rows), (plain, _) = map(_steps_of_the_instance, (2, None))
    assert_same(ours, plain)
    if BACKEND == "torch":
        assert rows[:2] in ([5, 3], [4, 4])


class Numbers(keras.Model):
    """Hands metrics and logs what it counts itself."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rate = Rate(name="rate")
        self.of_classes = OfClasses(name="of_classes")
        self.total = keras.metrics.Sum(name="total")
        self.by_tokens = keras.metrics.Mean(name="by_tokens")
        self.mean = keras.metrics.Mean(name="mean")

    @property
    def metrics(self):
        own = (self.rate, self.of_classes, self.total, self.by_tokens)
        return [*own, self.mean]

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        wrong = ops.cast((y_pred > 0) != (y > 0), "int32")
        kinds = ops.one_hot(ops.cast(ops.abs(x[:, 0]) > 0.5, "int32"), 4)
        count = ops.sum(ops.ones_like(wrong))
        self.rate.update_state(ops.sum(wrong), count)
        self.of_classes.update_state(ops.sum(kinds, axis=0))
        self.total.update_state(ops.sum(ops.abs(y_pred)))
        tokens = ops.sum(ops.cast(x > 0, "float32"))
        error = ops.sum(ops.where(x > 0, ops.abs(y - y_pred), 0.0)) / tokens
        self.by_tokens.update_state(error, sample_weight=tokens)
        self.mean.update_state(values=ops.mean(ops.abs(y - y_pred)))
        found = {metric.name: metric.result() for metric in self.metrics}
        found["of_classes"] = found["of_classes"][1]
        return found | {"logged": ops.mean(ops.square(y_pred))}


class Rate(keras.metrics.Metric):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.wrong = self.add_variable((), "zeros", dtype="int32")
        self.all = self.add_variable((), "zeros", dtype="int32")

    def update_state(self, wrong, count):
        self.wrong.assign(self.wrong + ops.cast(wrong, "int32"))
        self.all.assign_add(ops.cast(count, "int32"))

    def result(self):
        return ops.cast(self.wrong, "float32") / ops.cast(self.all, "float32")


class OfClasses(keras.metrics.Metric):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.counts = self.add_variable((4,), "zeros")

    def update_state(self, counts):
        self.counts.assign_add(counts)

    def result(self):
        return self.counts / ops.sum(self.counts)


@ON_REPLICAS
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_numbers_for_metrics_and_logs(num_replicas, run_eagerly):
    """The counts of classes are as many as the rows of a replica."""

    def outcome(count):
        inputs = keras.Input((4,))
        model = compiled(
            count,
            lambda: Numbers(inputs, layers.Dense(1)(inputs)),
            eager=run_eagerly,
        )
        return flat("", model.evaluate(**models.table(22), **EVALUATE))

    assert_same(outcome(num_replicas), outcome(None))


class Logs(keras.Model):
    def test_step(self, data):
        y_pred = self(data[0], training=False)
        return {"a": {"b": self.made(data[0], y_pred)}}


def _logs(count, made, run_eagerly):
    options = compile_mode(run_eagerly)
    model = _model(count, Logs, None, None, None, **options)
    model.made = made
    return flat("", model.evaluate(**models.table(16), **EVALUATE))


@ON_REPLICAS
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize(
    "made",
    [
        lambda x, y: ops.mean(x, axis=0),
        lambda x, y: ops.sum(ops.square(y), axis=-1),
        lambda x, y: ops.sum(ops.cast(x > 0, "int32")),
    ],
    ids=["columns", "rows", "integer"],
)
def test_logs_that_differ_are_refused(made, run_eagerly):
    with pytest.raises(
        keras_dist.ReplicaDivergenceError, match=r"the log \['a'\]\['b'\]"
    ):
        _logs(2, made, run_eagerly)


@ON_REPLICAS
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_logs_that_are_the_same(run_eagerly):
    def made(x, y):
        positive = ops.cast(x > 0, "int32")
        return ops.sum(keras_dist.sum_over_rows(positive))

    assert_same(_logs(2, made, run_eagerly), _logs(None, made, run_eagerly))


class Table(layers.Layer):
    """Returns its table beside what it computes of each row."""

    def build(self, shape):
        self.table = self.add_weight(
            shape=(8, shape[-1]), initializer="glorot_uniform", name="table"
        )

    def call(self, x):
        table = ops.convert_to_tensor(self.table)
        return {"rows": ops.matmul(x, ops.transpose(table)), "table": table}


def _apart(y_true, y_pred):
    products = ops.matmul(y_pred, ops.transpose(y_pred))
    return ops.mean(ops.square(products - ops.eye(y_pred.shape[0])))


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_an_output_without_rows(num_replicas, run_eagerly):
    """As many entries as a batch has rows, or a replica."""

    def outcome(count):
        inputs = keras.Input((4,))
        model = compiled(
            count,
            lambda: keras.Model(inputs, Table()(inputs)),
            lambda: keras.optimizers.SGD(0.1),
            eager=run_eagerly,
            loss={"rows": "mse", "table": _apart},
        )
        x = models.table(24)["x"]
        y = {"rows": np.tile(x, 2), "table": np.zeros((24, 1), "float32")}
        history = model.fit(x, y, **FIT).history
        predicted = model.predict(x, batch_size=8, verbose=0)
        return (
            flat("history", history)
            | flat("predicted", predicted)
            | state_of(model)
        )

    assert_same(outcome(num_replicas), outcome(None))


class Contrast(keras.Model):
    """Compares each row with all rows, in a loss of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        context = keras_dist.get_replica_context()
        every, other = y_pred, ops.convert_to_tensor(y)
        if context is not None:
            every = context.all_gather(every, axis=0)
            other = context.all_gather(other, axis=0)
        alike = ops.matmul(every, ops.transpose(other))
        return ops.mean(ops.logsumexp(alike, axis=1) - ops.diag(alike))


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_rows_that_need_each_other(num_replicas):
    def outcome(count):
        model = _model(count, Contrast, None, None, None, jit_compile=JIT)
        return fitted(model, **models.table(22), **FIT)

    assert_same(outcome(num_replicas), outcome(None))


class Unfreeze(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.model.layers[1].trainable = True
            self.model.compile(
                keras.optimizers.SGD(0.01, momentum=0.9),
                "mse",
                metrics=["mae"],
                jit_compile=JIT,
            )
            self.model.make_train_function(force=True)


@pytest.mark.skipif(BACKEND == "jax", reason="Keras itself fails there.")
def test_compile_in_a_callback():
    def build():
        model = models.sequence(models.dense(3), models.dense())()
        model.layers[0].trainable = False
        return model

    def outcome(count):
        options = FIT | {"epochs": 3, "callbacks": [Unfreeze()]}
        return fitted(
            compiled(count, build, "adam"), **models.table(22), **options
        )

    assert_same(outcome(2), outcome(None))
