"""A strategy of one device keeps all there, also if it is not the default one.

On PyTorch virtual devices differ in name only: there the tests hold that
nothing is refused, and that strategies say the right names.
"""

import keras
import numpy as np
import pytest

import keras_dist
from conformance.helpers import compiles
from conformance.helpers import function
from conformance.helpers import tensor
from conformance.helpers import to_numpy
from conformance.pages import PLACES
from conformance.pages import Range
from conformance.pages import places

HERE = PLACES[1:]
X = np.arange(24.0, dtype="float32").reshape(12, 2) / 24
Y = np.ones((12, 1), "float32")
FUNCTIONS = ["plain", pytest.param("compiled", marks=compiles)]


@pytest.fixture
def strategy():
    return keras_dist.OneDeviceStrategy("cpu:1")


def make_model():
    model = keras.Sequential(
        [
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    model.compile(
        keras.optimizers.Adam(use_ema=True, gradient_accumulation_steps=2),
        "mse",
        metrics=["mae", keras.metrics.RootMeanSquaredError()],
    )
    return model


def all_variables(model):
    metrics = [v for metric in model.metrics for v in metric.variables]
    return [*model.variables, *model.optimizer.variables, *metrics]


def assert_here(strategy, variables):
    assert variables
    for variable in variables:
        assert strategy.devices_of(variable) == ("cpu:1",), variable.path
        assert places(variable.value) == HERE, variable.path


def test_every_kind_of_variable_made_in_scope(strategy):
    with strategy.scope():
        made = [
            keras.Variable(1.0),
            keras.Variable(keras.initializers.RandomNormal(), shape=(3,)),
            keras.Variable(1, dtype="int32", trainable=False),
            keras.Variable(0.0, synchronization="on_read", aggregation="sum"),
            keras.random.SeedGenerator(1).state,
            *keras.metrics.Mean().variables,
        ]
    assert_here(strategy, made)


@pytest.mark.parametrize("built", ["before", "by fit"])
@pytest.mark.parametrize("compiled", ["in scope", "outside"])
def test_every_variable_of_a_model(strategy, built, compiled):
    with strategy.scope():
        model = make_model()
        if built == "before":
            model.build((None, 2))
    if compiled == "outside":
        model.compile("adam", "mse", metrics=["mae"])
    for _ in range(2):
        model.fit(X, Y, batch_size=5, verbose=0)
        model.evaluate(X, Y, batch_size=5, verbose=0)
        assert model.predict(X, batch_size=5, verbose=0).shape == (12, 1)
        assert_here(strategy, all_variables(model))
        model.layers[0].kernel.assign(np.ones((2, 4), "float32"))
    assert_here(strategy, all_variables(model))


def test_a_model_that_was_made_elsewhere_moves(strategy, tmp_path):
    model = make_model()
    model.fit(X, Y, verbose=0)
    before = model.get_weights()
    strategy.distribute(model)
    assert_here(strategy, all_variables(model))
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    model.fit(X, Y, verbose=0)
    assert_here(strategy, all_variables(model))
    model.save(tmp_path / "model.keras")
    with strategy.scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.load_weights(tmp_path / "model.keras")
    loaded.fit(X, Y, verbose=0)
    assert_here(strategy, all_variables(loaded))


def _iterated(iterator):
    iterator.initialize()
    return [iterator.get_next() for _ in range(2)]


def _sources(strategy):
    """Each way to distributed batches: of 0 and 1, and of 2 and 3."""
    yield strategy.experimental_distribute_dataset(Range(4, 2))
    yield strategy.distribute_datasets_from_function(lambda _: Range(4, 2))
    arrays = strategy.experimental_make_numpy_dataset(np.arange(4))
    yield strategy.experimental_distribute_dataset(arrays.batch(2))
    yield _iterated(strategy.make_dataset_iterator(Range(4, 2)))
    yield _iterated(strategy.make_input_fn_iterator(lambda _: Range(4, 2)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_distributed_batch(strategy):
    for source in _sources(strategy):
        rows = list(source)
        assert [to_numpy(each).tolist() for each in rows] == [[0, 1], [2, 3]]
        assert [places(each) for each in rows] == [HERE, HERE]
        assert places(strategy.run(lambda x: x * 2, args=(rows[1],))) == HERE


def test_values_from_a_function(strategy):
    value = strategy.experimental_distribute_values_from_function(
        lambda context: tensor([1.0, 2.0])
    )
    assert places(value) == HERE
    assert places(strategy.run(lambda x: x + 1, args=(value,))) == HERE
    number = strategy.experimental_distribute_values_from_function(
        lambda context: context.num_replicas_in_sync
    )
    assert number == 1


def step_fns():
    def plain(x):
        return {
            "made": keras.ops.ones((2,)),
            "random": keras.random.normal((2,)),
            "of an argument": keras.ops.multiply(x, 2.0),
            "of a number": keras.ops.convert_to_tensor(1.0) + 1.0,
        }

    return {"plain": plain, "compiled": function(plain)}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("argument", ["tensor", "array"])
@pytest.mark.parametrize("inside", [True, False])
def test_every_function_under_run(strategy, name, argument, inside):
    fn = step_fns()[name]
    x = np.ones(2, "float32") if argument == "array" else tensor([1.0, 1.0])
    for _ in range(2):
        if inside:
            with strategy.scope():
                result = strategy.run(fn, args=(x,))
        else:
            result = strategy.run(fn, args=(x,))
        assert {k: places(v) for k, v in result.items()} == dict.fromkeys(
            result, HERE
        )
    # Outside nothing has changed.
    assert places(tensor([1.0])) == PLACES[:1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_computed_of_variables(strategy, name):
    with strategy.scope():
        v = keras.Variable([1.0, 2.0])

    def step():
        v.assign_add([1.0, 1.0])
        return v * 2.0

    fn = step if name == "plain" else keras_dist.function(step)
    for _ in range(2):
        assert places(strategy.run(fn)) == HERE
    assert_here(strategy, [v])
    assert to_numpy(v.value).tolist() == [3.0, 4.0]
    assert places(strategy.run(lambda: keras.Variable(1.0).value)) == HERE


def test_a_loop_of_ones_own_stays_there(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.01)

    @function
    def step(x, y):
        def loss_fn():
            return keras.ops.mean((model(x) - y) ** 2)

        loss, grads = keras_dist.value_and_grad(
            loss_fn, model.trainable_variables
        )
        optimizer.apply(grads, model.trainable_variables)
        return loss

    losses = []
    for x, y in strategy.experimental_distribute_dataset([(X, Y)] * 5):
        loss = strategy.run(step, args=(x, y))
        assert places(loss) == HERE
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert_here(strategy, [*model.variables, *optimizer.variables])


def test_results_of_other_methods(strategy):
    value = strategy.run(lambda: tensor([[1.0], [2.0]]))
    assert places(strategy.reduce("SUM", value, axis=0)) == HERE
    assert places(strategy.gather(value, axis=0)) == HERE
    with strategy.scope():
        v = keras.Variable(1.0)
    extended = strategy.extended
    assert places(extended.update(v, lambda c: c + 1.0)) == HERE
    assert places(extended.reduce_to("SUM", tensor(1.0), v)) == HERE
    assert places(extended.broadcast_to(tensor(1.0), v)) == HERE


# The reference pages: the class.
@pytest.mark.parametrize("module", [keras_dist, keras_dist.compat.v1])
def test_the_page(module):
    strategy = module.OneDeviceStrategy(device="/cpu:1")
    with strategy.scope():
        v = keras.Variable(1.0)
    assert strategy.devices_of(v) == ("cpu:1",)
    results = [strategy.run(lambda x: x * 2, args=(i,)) for i in range(10)]
    assert sum(results) == 90
    assert strategy.cluster_resolver is None
    assert strategy.num_replicas_in_sync == 1
