"""Variables that layers assign in their call are what one device has."""

import keras
import pytest
from keras import layers
from keras import ops

import keras_dist
from parity import models
from parity.harness import BACKEND
from parity.harness import FIT
from parity.harness import assert_same
from parity.harness import central
from parity.harness import compiled
from parity.harness import results
from parity.harness import strategy


class Watches(layers.Layer):
    """Keeps numbers about the rows that it has seen."""

    shape, dtypes, aggregation = (), ("float32", "int32"), "sum"

    def build(self, input_shape):
        self.seen = [
            self.add_weight(
                name=f"seen_{dtype}",
                shape=self.shape,
                dtype=dtype,
                initializer="zeros",
                trainable=False,
                aggregation=self.aggregation,
            )
            for dtype in self.dtypes
        ]

    def call(self, x):
        for variable in self.seen:
            self.see(x, variable)
        return x


class Rows(Watches):
    """Counts them, as integers and as floats."""

    def see(self, x, variable):
        variable.assign_add(ops.cast(ops.shape(x)[0], variable.dtype))


class Some(Watches):
    """Counts those that have a positive entry, in each column."""

    shape = (4,)

    def see(self, x, variable):
        positive = ops.sum(ops.cast(x > 0, variable.dtype), axis=0)
        variable.assign_add(ops.cast(positive, variable.dtype))


class Steps(Watches):
    """What every replica counts alike."""

    aggregation = "none"

    def see(self, x, variable):
        variable.assign_add(ops.ones((), variable.dtype))


class Average(Watches):
    """A moving one, of means over rows."""

    shape, dtypes, aggregation = (4,), ("float32",), "mean"

    def see(self, x, variable):
        variable.assign(0.9 * variable + 0.1 * ops.mean(x, axis=0))


class Sums(Watches):
    """Added twice in a call."""

    dtypes = ("float32",)

    def see(self, x, variable):
        variable.assign_add(ops.sum(x))
        variable.assign_sub(2.0 * ops.sum(x))


class LastSum(Watches):
    """Assigned, and not added."""

    def see(self, x, variable):
        variable.assign(ops.cast(ops.sum(ops.abs(x) * 9), variable.dtype))


class AroundAMetric(Watches):
    """Assigned before and after a metric is read, which all replicas update."""

    dtypes = ("float32",)

    def build(self, input_shape):
        super().build(input_shape)
        self.mean = keras.metrics.Mean(name="mean")

    def see(self, x, variable):
        variable.assign(ops.sum(x))
        self.mean.update_state(ops.sum(x, axis=-1))
        self.mean.result()
        variable.assign_add(ops.sum(x))


class OutOfPlace(AroundAMetric):
    """Replicas differ while a metric is read, and then no longer."""

    aggregation = "none"

    def see(self, x, variable):
        super().see(x, variable)
        variable.assign(ops.ones(()))


class Shared(Watches):
    """A moving average of sums: the same on each replica."""

    aggregation, dtypes = "none", ("float32",)

    def see(self, x, variable):
        total = ops.sum(keras_dist.sum_over_rows(x))
        variable.assign(0.9 * variable + 0.1 * total)


class InTraining(Rows):
    def call(self, x, training=None):
        return super().call(x) if training else x


def in_a_layer(cls):
    """A layer that calls another one, twice."""

    class Outer(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = cls()

        def build(self, shape):
            self.inner.build(shape)

        def call(self, x):
            return self.inner(self.inner(x))

    return Outer


CASES = [
    Rows,
    Some,
    Steps,
    Average,
    Sums,
    LastSum,
    Shared,
    InTraining,
    in_a_layer(Rows),
]
if BACKEND != "jax":  # where Keras' step can't read a metric of a layer
    CASES += [AroundAMetric, OutOfPlace]


def _compiled(count, layer, **options):
    """A model of such a layer, whose variables are all zero."""
    model = compiled(count, models.sequence(layer, models.dense()), **options)
    for variable in model.layers[0].non_trainable_variables:
        variable.assign(ops.zeros(variable.shape, variable.dtype))
    return model


def _outcome(count, layer, eager=False):
    # 15 rows: shares of one size, of several, and of none.
    model = _compiled(count, layer, eager=eager)
    return results(model, models.table(15))


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("layer", CASES, ids=lambda cls: cls.__name__)
def test_same_numbers(layer, num_replicas):
    assert_same(_outcome(num_replicas, layer), _outcome(None, layer))


@pytest.mark.parametrize("make", [strategy, central])
def test_calls_are_counted_where_nothing_is_trained(make):
    """Each step reads what the last one has assigned, and not this one."""
    model = _compiled(2, Steps, make=make)
    for _ in range(10):
        model.evaluate(**models.table(20), batch_size=2, verbose=0)
    assert {float(_number(each)) for each in model.layers[0].seen} == {100.0}


def test_run_eagerly():
    assert_same(_outcome(3, Rows, True), _outcome(None, Rows, True))


def test_the_count_is_that_of_the_rows():
    model = _compiled(2, Rows)
    model.fit(**models.table(50), batch_size=10, epochs=1, verbose=0)
    counts = map(_number, model.layers[0].seen)
    assert [int(count) for count in counts] == [50, 50]


def _number(variable):
    return ops.convert_to_numpy(variable.value)


class Undeclared(Watches):
    """Keeps the largest number so far."""

    aggregation, dtypes = "none", ("float32",)

    def see(self, x, variable):
        variable.assign(ops.maximum(variable, ops.max(x)))


not_on_jax = pytest.mark.skipif(
    BACKEND == "jax", reason="A step has all rows at once."
)


@not_on_jax
@pytest.mark.parametrize("eager", [False, True])
def test_what_differs_has_to_be_declared(eager):
    model = _compiled(2, Undeclared, eager=eager)
    before = model.get_weights()
    with pytest.raises(
        keras_dist.ReplicaDivergenceError,
        match=r"(?s)undeclared\w*/seen_float32.*aggregation=.*set_aggregation",
    ):
        model.fit(**models.table(16), **FIT)
    # Nothing is lost.
    for old, new in zip(before, model.get_weights(), strict=True):
        assert (old == new).all()
    keras_dist.set_aggregation(model.layers[0], "only_first_replica")
    model.fit(**models.table(16), **FIT)


@not_on_jax
def test_verify_tells_of_what_is_not_declared():
    report = strategy(2).verify(
        lambda: _compiled(None, Undeclared), **models.table(16)
    )
    assert not report.same
    assert report.first.name.endswith("seen_float32")
    assert report.cause.name == "a state counted in shares"
    assert "aggregation=" in str(report)


class Foreign(Average):
    """Somebody else's layer, which declares nothing."""

    aggregation = "none"


def test_a_layer_of_somebody_else_is_declared_from_outside():
    def outcome(count):
        model = _compiled(count, Foreign)
        keras_dist.set_aggregation(model.layers[0], "mean")
        return results(model, models.table(15))

    assert_same(outcome(3), outcome(None))


def test_what_can_not_be_declared_is_refused():
    layer = Steps()
    layer.build((None, 4))
    with pytest.raises(ValueError, match="aggregation='average'"):
        keras_dist.set_aggregation(layer, "average")
    with pytest.raises(ValueError, match=r"(?s)seen_int32.*int32.*'sum'"):
        keras_dist.set_aggregation(layer, "mean")
    with pytest.raises(ValueError, match="layer that is built"):
        keras_dist.set_aggregation(layers.Dense(1), "mean")
