"""Copies of a distributed model train on replicas, or say that they don't."""

import copy
import pickle

import keras
import numpy as np
import pytest

from parity import harness
from parity import models

KINDS = {
    "mirrored": harness.strategy,
    "central": harness.central,
}
if harness.BACKEND == "jax":
    # Others keep the optimizer's state whole in a process.
    KINDS["sharded"] = harness.sharded


each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())


def _compiled(model):
    model.compile(
        keras.optimizers.Adam(0.05), "mse", metrics=["mae"], jit_compile=False
    )
    return model


def _fit(model, epochs=2):
    options = harness.FIT | {"epochs": epochs}
    return model.fit(**models.table(21), **options).history


def _trained(scope):
    with scope:
        model = _compiled(harness.set_initial_weights(models.mlp()))
    _fit(model)
    return model


def _values(model):
    variables = [*model.weights, *model.optimizer.variables]
    return [harness.to_numpy(v) for v in variables]


def _assert_alike(model, expected):
    for ours, plain in zip(_values(model), _values(expected), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-4, atol=2e-6)


def _assert_belongs(thing, strategy):
    variables = list(thing.variables)
    assert variables
    assert all(v.distribute_strategy is strategy for v in variables)


@each_kind
def test_a_deepcopy_goes_on_as_its_model_would(make):
    strategy = make(2)
    model = _trained(strategy.scope())
    another = copy.deepcopy(model)
    _assert_belongs(another, strategy)
    _assert_belongs(another.optimizer, strategy)
    before = _values(model)
    history = _fit(another)
    for now, then in zip(_values(model), before, strict=True):
        np.testing.assert_array_equal(now, then)
    expected = _trained(harness.scope(None))
    np.testing.assert_allclose(history["loss"], _fit(expected)["loss"], 1e-4)
    _assert_alike(another, expected)


@each_kind
def test_a_clone_belongs_to_the_strategy(make):
    strategy = make(2)
    model = _trained(strategy.scope())
    clone = _compiled(keras.models.clone_model(model))
    clone.set_weights(model.get_weights())
    _fit(clone)
    _assert_belongs(clone, strategy)
    expected = _trained(harness.scope(None))
    plain = _compiled(keras.models.clone_model(expected))
    plain.set_weights(expected.get_weights())
    _fit(plain)
    _assert_alike(clone, plain)


@each_kind
def test_a_deepcopy_of_a_part_belongs_to_the_strategy(make):
    strategy = make(2)
    model = _trained(strategy.scope())
    layer = copy.deepcopy(model.layers[-1])
    _assert_belongs(layer, strategy)
    for ours, theirs in zip(
        layer.weights, model.layers[-1].weights, strict=True
    ):
        assert ours is not theirs
        np.testing.assert_array_equal(
            harness.to_numpy(ours), harness.to_numpy(theirs)
        )
    with strategy.scope():
        metric = keras.metrics.Mean()
    metric.update_state([1.0, 2.0])
    another = copy.deepcopy(metric)
    _assert_belongs(another, strategy)
    another.update_state([6.0])
    assert float(metric.result()) == 1.5


def test_a_copied_variable_keeps_what_it_was_made_with():
    with harness.strategy(2).scope():
        variable = keras.Variable([1.0, -2.0], name="v")
    variable.constraint = keras.constraints.NonNeg()
    variable.regularizer = keras.regularizers.L2(0.1)
    another = copy.deepcopy(variable)
    assert another.constraint is not None
    assert another.regularizer is not None
    assert variable.name == another.name


def test_a_copy_in_another_scope_belongs_to_that_one():
    model = _trained(harness.scope(2))
    other = harness.strategy(3)
    with other.scope():
        another = copy.deepcopy(model)
    _assert_belongs(another, other)
    _fit(another)


def _loaded(model, folder):
    model.save(folder / "model.keras")
    return keras.models.load_model(folder / "model.keras")


def _from_config(model, folder):
    return _compiled(type(model).from_config(model.get_config()))


WAYS = {
    "loaded": _loaded,
    "unpickled": lambda model, folder: pickle.loads(pickle.dumps(model)),
    "shallow": lambda model, folder: copy.copy(model),
    "from_config": _from_config,
}


@pytest.mark.parametrize("name", WAYS)
def test_what_is_made_from_data_says_that_it_is_not_distributed(name, tmp_path):
    strategy = harness.strategy(2)
    plain = WAYS[name](_trained(strategy.scope()), tmp_path)
    with pytest.warns(UserWarning, match="trains on one device") as caught:
        _fit(plain)
    caught = [w for w in caught if "one device" in str(w.message)]
    assert len(caught) == 1
    for words in (repr(strategy), "strategy.scope()", "strategy.distribute"):
        assert words in str(caught[0].message)
    assert caught[0].filename.endswith("test_duplicates.py")
    _fit(plain)
    if name != "from_config":
        expected = _trained(harness.scope(None))
        _fit(expected, 4)
        _assert_alike(plain, expected)


@pytest.mark.parametrize("name", ["loaded", "unpickled", "from_config"])
def test_the_ways_out_are_silent_and_distributed(name, tmp_path):
    strategy = harness.strategy(2)
    model = _trained(strategy.scope())
    with strategy.scope():
        inside = WAYS[name](model, tmp_path)
    adopted = strategy.distribute(WAYS[name](model, tmp_path))
    for each in (inside, adopted):
        _fit(each)
        _assert_belongs(each, strategy)


def test_plain_models_are_copied_without_a_word(tmp_path):
    harness.strategy(2)
    model = _trained(harness.scope(None))
    for way in WAYS.values():
        _fit(way(model, tmp_path))
    _fit(copy.deepcopy(model))
