"""Where variables and batches lie, and whose arrays they are."""

import contextlib

import jax
import keras
import numpy as np
import pytest

import keras_dist


def devices_of(array):
    return sorted(f"{d.platform}:{d.id}" for d in array.devices())


def strategy_of(*indices):
    return keras_dist.MirroredStrategy([f"cpu:{i}" for i in indices])


@pytest.mark.parametrize("indices", [(0,), (1,), (0, 1), (2, 3), (0, 1, 2, 3)])
def test_variables_lie_on_each_device(make_model, data, indices):
    strategy = strategy_of(*indices)
    with strategy.scope():
        variable = keras.Variable(np.ones(3, "float32"))
        model = make_model()
    model.fit(*data, batch_size=16, verbose=0)
    model.train_on_batch(data[0][:4], data[1][:4])
    names = [f"cpu:{i}" for i in indices]
    for v in [variable, *model.variables, *model.optimizer.variables]:
        assert devices_of(v.value) == names
        assert v.value.is_fully_replicated
    assert strategy.devices_of(variable) == tuple(names)


def test_one_device_off_the_default(make_model, data, compilations):
    with keras_dist.OneDeviceStrategy("cpu:3").scope():
        model = make_model()
    model.fit(*data, batch_size=16, epochs=2, verbose=0)
    assert devices_of(model.layers[0].kernel.value) == ["cpu:3"]
    assert devices_of(model(data[0])) == ["cpu:3"]
    compilations["programs"] = 0
    model.fit(*data, batch_size=16, epochs=2, verbose=0)
    assert compilations["programs"] == 0


def test_placing_again_moves_nothing():
    strategy = strategy_of(0, 1)
    with strategy.scope():
        variable = keras.Variable(np.ones(3, "float32"))
    before = variable.value
    strategy.executor.storage(variable).place()
    assert variable.value is before


def test_a_placed_variable_shares_no_buffer_with_the_users_array(make_model):
    mine = jax.numpy.ones((6, 8))
    model = make_model(2)
    model.layers[0].kernel.assign(mine)
    x, y = np.ones((4, 6), "float32"), np.zeros(4, int)
    model.fit(x, y, verbose=0)
    model.fit(x, y, verbose=0)
    np.testing.assert_array_equal(mine, np.ones((6, 8)))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_array_read_from_a_variable_outlives_training(
    make_model, data, num_replicas
):
    model = make_model(num_replicas)
    kernel = model.layers[0].kernel.value
    before = np.array(kernel)
    model.fit(*data, batch_size=16, verbose=0)
    after = model.layers[0].kernel.value
    model.fit(*data, batch_size=16, verbose=0)
    model.evaluate(*data, verbose=0)
    model.train_on_batch(*data)
    np.testing.assert_array_equal(kernel, before)
    assert np.abs(np.array(after) - before).max() > 0


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_adopted_models_arrays_outlive_training(
    make_model, data, num_replicas
):
    model = make_model()
    kernel = model.layers[0].kernel.value
    before = np.array(kernel)
    strategy_of(*range(1, num_replicas + 1)).distribute(model)
    model.fit(*data, batch_size=16, verbose=0)
    np.testing.assert_array_equal(kernel, before)


def test_two_variables_of_one_array(make_model, data):
    model = make_model(2, layers=(6, 6))
    first, second = model.layers[0].kernel, model.layers[1].kernel
    second.assign(first.value)
    assert second.value is first.value
    model.fit(*data, batch_size=16, verbose=0)
    assert np.abs(np.array(first) - np.array(second)).max() > 0


@pytest.mark.parametrize("kind", ["numpy", "jax", "committed"])
@pytest.mark.parametrize("rows", [1, 7, 8])
def test_batches_of_any_kind_on_batch(make_model, data, kind, rows):
    plain, ours = make_model(), make_model(2)
    x, y = data[0][:rows], data[1][:rows]
    convert = {
        "numpy": lambda a: a,
        "jax": jax.numpy.asarray,
        # On a device that is none of the strategy's.
        "committed": lambda a: jax.device_put(a, jax.devices()[3]),
    }[kind]
    expected = plain.train_on_batch(x, y), plain.test_on_batch(x, y)
    got = (
        ours.train_on_batch(convert(x), convert(y)),
        ours.test_on_batch(convert(x), convert(y)),
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(
        ours.predict_on_batch(convert(x)), plain.predict_on_batch(x), atol=1e-5
    )


def test_leaves_of_unequal_length_are_not_cut():
    class Table(keras.Model):
        """Adds one row, of a second input, to each row of the first."""

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, inputs):
            return self.dense(inputs["x"]) + inputs["row"]

    def batches():
        rng = np.random.default_rng(0)
        for _ in range(4):
            x = rng.normal(size=(8, 3)).astype("float32")
            yield {"x": x, "row": np.ones((1, 2), "float32")}, x[:, :2]

    weights = []
    for indices in ((0,), (0, 1)):
        keras.utils.set_random_seed(0)
        with strategy_of(*indices).scope():
            model = Table()
            model.compile("adam", "mse")
        with (
            pytest.warns(UserWarning, match="different numbers of rows")
            if len(indices) > 1
            else contextlib.nullcontext()
        ):
            model.fit(batches(), steps_per_epoch=4, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for one, two in zip(*weights, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)


@pytest.mark.parametrize("num_replicas", [2, 4])
@pytest.mark.parametrize("steps_per_execution", [1, 4])
@pytest.mark.parametrize("batch_size", [3, 7, 8])
def test_predict_returns_all_rows_in_order(
    make_model, data, num_replicas, steps_per_execution, batch_size
):
    plain = make_model()
    ours = make_model(num_replicas, steps_per_execution=steps_per_execution)
    x = data[0][:29]
    np.testing.assert_allclose(
        ours.predict(x, batch_size=batch_size, verbose=0),
        plain.predict(x, verbose=0),
        atol=1e-5,
    )


@pytest.mark.parametrize(
    "how", [{"run_eagerly": True}, {"jit_compile": False}], ids=str
)
def test_steps_that_are_not_compiled(make_model, data, how):
    results = []
    for num_replicas, kwargs in ((None, {}), (2, how)):
        model = make_model(num_replicas, metrics=["accuracy"], **kwargs)
        x, y = data[0][:20], data[1][:20]
        history = model.fit(
            *(x, y),
            batch_size=8,
            epochs=2,
            verbose=0,
            validation_data=(x, y),
        ).history
        results.append((history, model.predict(x, verbose=0)))
    (plain, plain_outputs), (ours, outputs) = results
    for name, values in plain.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-4)
    np.testing.assert_allclose(outputs, plain_outputs, atol=1e-4)
