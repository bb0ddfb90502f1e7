"""Central storage keeps variables on their device, and none elsewhere."""

import gc

import jax
import keras
import numpy as np
import pytest
from central_models import classifier
from central_models import variables_of

import keras_dist
from backends.jax.measures import size_of
from keras_dist_jax.central import storage as central
from parity import harness

SETUPS = pytest.mark.parametrize(
    ("compute", "parameter"),
    [
        (["cpu:0", "cpu:1"], "cpu:3"),
        (["cpu:0", "cpu:1"], "cpu:0"),
        (["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]),
        (["cpu:0"], "cpu:3"),
    ],
    ids=["apart", "among", "several", "one"],
)


@pytest.fixture
def bytes_on():
    """A callable: bytes of arrays on each device, above the start's."""

    def count():
        gc.collect()
        held = {}  # by address: looking at an array makes others of it
        for array in jax.live_arrays():
            for shard in array.addressable_shards:
                address = shard.data.unsafe_buffer_pointer()
                held[shard.device.id, address] = shard.data.nbytes
        total = dict.fromkeys(range(4), 0)
        for (index, _), number in held.items():
            total[index] += number
        return total

    start = count()
    return lambda: {f"cpu:{k}": v - start[k] for k, v in count().items()}


def names_of(strategy):
    """The parameter devices' names."""
    return set(strategy.extended.parameter_devices)


def assert_at_rest(strategy, variables):
    for variable in variables:
        (device,) = strategy.devices_of(variable)
        assert device in names_of(strategy)
        index = int(device.split(":")[1])
        assert variable.value.devices() == {jax.devices()[index]}


# Logs, batches and replicas' own values of metrics.
SLACK = 2500


@SETUPS
def test_one_copy_of_each_variable_where_its_owner_is(
    data, bytes_on, compute, parameter
):
    strategy = keras_dist.CentralStorageStrategy(compute, parameter)
    with strategy.scope():
        model = classifier()
    x, y = data

    def use():
        yield "made"
        model.fit(x, y, batch_size=25, epochs=2, verbose=0)
        yield "fitted"
        model.train_on_batch(x[:7], y[:7])
        yield "trained on a batch"
        model.evaluate(x, y, batch_size=25, verbose=0)
        yield "evaluated"
        model.predict(x, batch_size=25, verbose=0)
        model.predict_on_batch(x[:7])
        yield "predicted"
        strategy.run(lambda: model(x[:4]))
        yield "run"
        strategy.run(keras_dist.function(lambda: model(x[:4])))
        yield "compiled"
        model.compile(model.optimizer, model.loss, run_eagerly=True)
        model.fit(x[:4], y[:4], verbose=0)
        yield "run eagerly"

    for what in use():
        variables = variables_of(model)
        assert_at_rest(strategy, variables)
        held = bytes_on()
        for device in set(compute) - names_of(strategy):
            assert held[device] < SLACK, what
        total = sum(held[device] for device in names_of(strategy))
        assert total < size_of(variables) + SLACK, what


@pytest.mark.parametrize("parameter", [["cpu:3"], ["cpu:2", "cpu:3"]])
def test_between_steps_compute_devices_hold_no_state(data, bytes_on, parameter):
    """Several other devices keep about as much each."""
    strategy = keras_dist.CentralStorageStrategy(["cpu:0", "cpu:1"], parameter)
    with strategy.scope():
        model = classifier()
    held = []

    def measure(batch, logs):
        jax.block_until_ready(logs)
        held.append(bytes_on())

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=measure)
    model.fit(*data, batch_size=16, callbacks=[callback], verbose=0)
    size = size_of(variables_of(model))
    largest = size_of([model.layers[2].kernel]) * 3
    assert len(held) == 4
    for each in held:
        assert max(each["cpu:0"], each["cpu:1"]) < SLACK
        kept = [each[device] for device in parameter]
        assert size <= sum(kept) < size + SLACK
        assert len(kept) == 1 or max(kept) <= largest + 2 * SLACK


@SETUPS
def test_variables_can_be_combined_outside_of_fit(compute, parameter):
    strategy = keras_dist.CentralStorageStrategy(compute, parameter)
    with strategy.scope():
        first = keras.Variable(np.ones(300, "float32"))
        second = keras.Variable(np.ones(300, "float32"))
    np.testing.assert_array_equal(first + second, np.full(300, 2.0))
    first.assign_add(second)
    first.assign(first * 3 + second)
    first.assign_sub(jax.numpy.ones(300))
    np.testing.assert_array_equal(first.value, np.full(300, 6.0))
    assert_at_rest(strategy, [first, second])


def test_a_loop_reads_variables_where_its_replica_is():
    strategy = keras_dist.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:3")
    with strategy.scope():
        layers = [keras.layers.LSTM(2), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3, 2)), *layers])
    x = np.ones((4, 3, 2), "float32")
    outputs = strategy.run(lambda: model(x)).values
    places = [output.devices() for output in outputs]
    assert places == [{jax.devices()[0]}, {jax.devices()[1]}]


@pytest.mark.parametrize("parameter", ["cpu:3", ["cpu:2", "cpu:3"]])
def test_saved_assigned_adopted(data, tmp_path, parameter):
    outcomes = []
    strategy = keras_dist.CentralStorageStrategy(["cpu:0", "cpu:1"], parameter)
    for distribute in (lambda model: model, strategy.distribute):
        model = distribute(classifier(metrics=[]))
        fit = {"batch_size": 25, "shuffle": False, "verbose": 0}
        model.fit(*data, **fit)
        model.optimizer.learning_rate = 0.02
        model.layers[0].bias.assign_add(np.ones(64, "float32"))
        model.save(tmp_path / "model.keras")
        model.fit(*data, **fit)
        with strategy.scope():
            loaded = keras.models.load_model(tmp_path / "model.keras")
        loaded.fit(*data, **fit)
        assert_at_rest(strategy, variables_of(loaded))
        outcomes += [model.get_weights(), loaded.get_weights()]
    for weights in outcomes[1:]:
        for got, expected in zip(weights, outcomes[0], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make", [harness.strategy, harness.central, harness.sharded]
)
def test_batches_that_are_padded_alike_have_their_own_rows(data, make):
    def trained(num_replicas):
        with harness.scope(num_replicas, make):
            model = classifier()
        for rows in (8, 7, 8, 7):
            model.train_on_batch(*(array[:rows] for array in data))
        return harness.state_of(model)

    harness.assert_same(trained(2), trained(None))


def test_copies_by_pinned_memory_are_the_same(data, monkeypatch):
    """What a GPU's values take to the host; the CPU has such memory too."""

    def weights_and_losses():
        keras.utils.set_random_seed(1)
        strategy = keras_dist.CentralStorageStrategy(["cpu:0"], "cpu:3")
        with strategy.scope():
            model = classifier()
        history = model.fit(*data, batch_size=16, epochs=2, verbose=0)
        assert_at_rest(strategy, variables_of(model))
        return [*model.get_weights(), *history.history["loss"]]

    expected = weights_and_losses()
    staged = []
    monkeypatch.setattr(central, "are_apart", lambda here, there: here != there)
    stage = central.pinned_memory
    monkeypatch.setattr(
        central,
        "pinned_memory",
        lambda device: staged.append(device) or stage(device),
    )
    for value, other in zip(weights_and_losses(), expected, strict=True):
        np.testing.assert_array_equal(value, other)
    assert staged
    assert stage(jax.devices()[0]).memory_kind == "pinned_host"
