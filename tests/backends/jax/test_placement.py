"""Variables and batches lie on the strategy's devices, and nowhere else."""

import jax
import keras
import numpy as np
import pytest

import keras_dist


def devices_of(array):
    return sorted(f"{d.platform}:{d.id}" for d in array.devices())


def strategy_of(*indices):
    return keras_dist.MirroredStrategy([f"cpu:{i}" for i in indices])


@pytest.mark.parametrize("indices", [(1,), (2, 3), (0, 1, 2, 3)])
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


@pytest.mark.parametrize(
    "strategy",
    [
        keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]),
        keras_dist.CentralStorageStrategy(["cpu:0"], "cpu:3"),
        keras_dist.CentralStorageStrategy(["cpu:0"], ["cpu:2", "cpu:3"]),
    ],
)
def test_placing_again_moves_nothing(strategy):
    with strategy.scope():
        variable = keras.Variable(np.ones(3, "float32"))
    before = variable.value
    strategy.executor.storage(variable).place()
    assert variable.value is before


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
