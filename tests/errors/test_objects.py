"""Values in dataclasses and other objects are seen, or the object is named."""

import collections
import dataclasses

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist

X = np.arange(4, dtype="float32")
Pair = collections.namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Batch:
    x: object


@dataclasses.dataclass(eq=False)
class Mutable:
    x: object


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: object


class Attrs:
    """As the package `attrs` marks its classes."""

    __attrs_attrs__ = (collections.namedtuple("Attribute", ["name"])("x"),)

    def __init__(self, x):
        self.x = x


class Plain:
    def __init__(self, x):
        self.x = x


KINDS = [Batch, Mutable, Frozen, Attrs, Plain]


def make_strategy():
    return keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])


def rows_of(strategy, x=X):
    (rows,) = strategy.experimental_distribute_dataset([x])
    return rows


def numbers(strategy, value):
    values = strategy.experimental_local_results(value)
    return [ops.convert_to_numpy(each).tolist() for each in values]


def doubled(batch):
    return ops.sum(ops.multiply(batch.x, 2.0))


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_and_results_of_run(kind):
    """Each replica computes with its own component, and returns its own."""
    strategy = make_strategy()
    result = strategy.run(doubled, args=(kind(rows_of(strategy)),))
    assert numbers(strategy, result) == [2.0, 10.0]
    result = strategy.run(lambda x: kind(ops.sum(x)), args=(rows_of(strategy),))
    values = strategy.experimental_local_results(result)
    assert [type(value) for value in values] == [kind, kind]
    assert [float(value.x) for value in values] == [1.0, 5.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inside", [False, True])
def test_an_argument_of_a_compiled_function(kind, inside):
    """Compiled with the first values, it would not see other ones."""
    strategy = make_strategy()
    compiled = keras_dist.function(doubled)
    batch = kind(rows_of(strategy))
    with pytest.raises(
        TypeError, match=rf"(?s)`batch`.*'doubled'.*{kind.__name__}.*`x`"
    ):
        if inside:
            strategy.run(lambda: compiled(batch))
        else:
            strategy.run(compiled, args=(batch,))


def test_a_tensor_in_a_dataclass_of_a_compiled_function():
    nested = keras_dist.function(lambda batch: ops.sum(batch.x["rows"][0]))
    for compiled, value in (
        (keras_dist.function(doubled), ops.ones((2,))),
        (nested, {"rows": [ops.ones((2,))]}),
    ):
        with pytest.raises(TypeError, match="Mutable, with a value in `x`"):
            compiled(Mutable(value))


def test_settings_and_models_are_no_values():
    strategy = make_strategy()
    compiled = keras_dist.function(
        lambda settings, x: ops.sum(settings.x(x)) * settings.y
    )

    @dataclasses.dataclass(eq=False)
    class Settings:
        x: object
        y: float = 2.0

    with strategy.scope():
        layer = keras.layers.Dense(1, kernel_initializer="ones")
        layer.build((None, 2))
    settings = Settings(layer)
    x = np.ones((3, 2), "float32")
    result = strategy.run(compiled, args=(settings, x))
    assert numbers(strategy, result) == [12.0, 12.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_of_a_compiled_function(kind):
    strategy = make_strategy()
    compiled = keras_dist.function(lambda x: kind(ops.sum(x)))
    try:
        result = strategy.run(compiled, args=(rows_of(strategy),))
    except keras_dist.TraceError as error:
        assert f"a {kind.__name__}" in str(error)
    else:
        values = strategy.experimental_local_results(result)
        assert [float(value.x) for value in values] == [1.0, 5.0]


COMBINING = {
    "reduce": lambda of, value: of.reduce("SUM", [value], axis=None),
    "gather": lambda of, value: of.gather(value, axis=0),
    "all_reduce": lambda of, value: of.all_reduce("SUM", value),
    "all_gather": lambda of, value: of.all_gather(value, axis=0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", ["each replica", "an object"])
@pytest.mark.parametrize("method", COMBINING)
def test_what_is_combined_is_named(kind, of, method):
    strategy = make_strategy()
    rows = rows_of(strategy)

    def replica_fn(x):
        context = keras_dist.get_replica_context()
        return COMBINING[method](context, kind(x))

    with pytest.raises(
        TypeError, match=f"(?s)`{method}`.*type {kind.__name__}"
    ):
        if method.startswith("all"):
            strategy.run(replica_fn, args=(rows,))
        elif of == "each replica":
            value = strategy.run(kind, args=(rows,))
            COMBINING[method](strategy, value)
        else:
            COMBINING[method](strategy, kind(rows))


def test_named_tuples_are_looked_into():
    strategy = make_strategy()
    nothing = keras_dist.PerReplica([None, None])
    with pytest.raises(TypeError, match="(?s)Only numbers.*Received: None"):
        strategy.reduce("SUM", nothing, axis=None)
    rows = rows_of(strategy)

    def replica_fn(pair):
        return Pair(doubled(pair), ops.sum(pair.y))

    for fn in (replica_fn, keras_dist.function(replica_fn)):
        result = strategy.run(fn, args=(Pair(rows, rows),))
        total = strategy.reduce("SUM", result, axis=None)
        assert isinstance(total, Pair)
        assert [float(each) for each in total] == [12.0, 6.0]
