"""One GPU under a strategy gives the numbers of plain Keras on that GPU."""

import functools

import keras
import pytest

import keras_dist
from gpu import models
from gpu import numbers
from gpu import places
from gpu.numbers import STRATEGIES

# XLA on GPUs is the default of JAX.
JITS = {"jax": ("auto",), "tensorflow": (False, True), "torch": (False,)}


@functools.cache
def plain(kind, jit_compile):
    """What plain Keras gives, trained once."""
    with numbers.plain_keras():
        return numbers.state_of(
            *numbers.trained(None, kind, jit_compile=jit_compile)
        )


@pytest.mark.parametrize("jit_compile", JITS[keras.backend.backend()])
@pytest.mark.parametrize("kind", models.KINDS)
@pytest.mark.parametrize("name", STRATEGIES)
def test_fit(name, kind, jit_compile, facts):
    model, history = numbers.trained(
        STRATEGIES[name](), kind, jit_compile=jit_compile
    )
    state = numbers.state_of(model, history)
    expected = plain(kind, jit_compile)
    far, _ = numbers.farthest(state, expected)
    facts.measured(f"largest difference, {name}, {kind}", far)
    numbers.assert_same(state, expected)


def test_default_strategy_takes_the_gpus():
    """Without arguments, `MirroredStrategy` computes on every GPU."""
    names = keras_dist.MirroredStrategy().plan.devices
    assert [str(name) for name in names] == [
        name
        for name in keras_dist.list_devices()
        if name.startswith(places.KIND)
    ]


@pytest.mark.parametrize("name", STRATEGIES)
def test_where_variables_are_and_what_is_saved(name, tmp_path):
    strategy = STRATEGIES[name]()
    model, _ = numbers.trained(strategy, "mlp")
    keeper = places.HOST if name == "central" else places.DEVICE
    for variable in [*model.weights, *model.optimizer.variables]:
        devices = strategy.executor.storage(variable).devices
        assert [str(device) for device in devices] == [keeper], variable.path
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x, _ = models.data("mlp", 9)
    expected = model.predict(x, verbose=0)
    found = loaded.predict(x, verbose=0)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", STRATEGIES)
def test_evaluate_and_predict_with_uneven_batches(name):
    with STRATEGIES[name]().scope():
        model = models.compiled("mlp")
    x, y = models.data("mlp", 23)
    logs = model.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)
    rows = model.predict(x, batch_size=5, verbose=0)
    with numbers.plain_keras():
        other = models.compiled("mlp")
        expected = other.evaluate(
            x, y, batch_size=23, verbose=0, return_dict=True
        )
        whole = other.predict(x, batch_size=23, verbose=0)
    assert set(logs) == set(expected)
    for key, value in logs.items():
        assert value == pytest.approx(expected[key], rel=1e-3), key
    assert rows == pytest.approx(whole, rel=1e-3, abs=1e-4)
