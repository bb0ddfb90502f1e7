"""All that Keras saves of a model is found, in one order on every worker."""

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_saveables
from parity import gans

PLACES = {
    "attributes": ["d_optimizer", "g_optimizer"],
    "dict": ["optimizers['g']", "optimizers['d']"],
    "list": ["optimizers[0]", "optimizers[1]"],
    "nested": ["kept['by net']['g'][0]", "kept['by net']['d'][0]['only']"],
    "parts": ["d.own_optimizer", "g.optimizer"],
    "compiled": ["d_optimizer"],
    "scaled": ["_d_optimizer", "optimizers['g']"],
}


@pytest.mark.parametrize("kind", gans.KINDS)
def test_optimizers_are_found_where_they_are(kind):
    model = gans.made(kind)
    places = list(keras_saveables.all_optimizers(model))
    expected = ["optimizer", *PLACES[kind]]
    if kind == "parts" and keras.backend.backend() == "torch":
        # A `torch.nn.Module` has its layers apart.
        expected[1:] = ["_layers[0].optimizer", "_layers[1].own_optimizer"]
    assert places == expected
    assert list(keras_saveables.all_optimizers(gans.made(kind))) == places
    for place in places:
        optimizer = eval(f"model.{place}", {"model": model})
        assert keras_saveables.all_optimizers(model)[place] is optimizer


@pytest.mark.parametrize("kind", gans.KINDS)
def test_those_that_keras_saves(kind, tmp_path, monkeypatch):
    model, saved = gans.made(kind), []
    cls = keras.optimizers.Optimizer
    original = cls.save_own_variables

    def save_own_variables(self, store):
        saved.append(self)
        original(self, store)

    monkeypatch.setattr(cls, "save_own_variables", save_own_variables)
    model.save_weights(tmp_path / "some.weights.h5")
    found = [
        thing
        for thing in keras_saveables.saveables(model).values()
        if isinstance(thing, cls)
    ]
    assert set(map(id, found)) == set(map(id, saved))


def test_an_optimizer_inside_of_another_one_is_part_of_it():
    model = gans.made("scaled")
    outer = model.optimizers["g"]
    found = keras_saveables.all_optimizers(model).values()
    found = {*map(id, found)}
    assert id(outer) in found and id(outer.inner_optimizer) not in found
    variables = [*map(id, keras_saveables.all_variables(model))]
    assert len(variables) == len(set(variables))
    assert {*map(id, outer.inner_optimizer.variables)} <= {*variables}


class Everywhere(gans.Two):
    """A model with objects where only a class or a loss has them."""

    of_class = None
    asked = 0

    @property
    def own(self):
        Everywhere.asked += 1
        return keras.optimizers.SGD()


def test_no_property_is_asked_and_no_name_is_used_up(monkeypatch):
    model = Everywhere()
    model.compile("adam", "mse")
    keras_saveables.all_variables(model)
    names = keras_internals.name_counts()
    keras_saveables.all_variables(model)
    assert model.asked == 0
    assert keras_internals.name_counts() == names
    monkeypatch.setattr(Everywhere, "of_class", gans.adam())
    found = keras_saveables.all_optimizers(Everywhere())
    assert found == {"of_class": Everywhere.of_class}


class Perceptual(keras.losses.Loss):
    """A loss with a network."""

    def __init__(self):
        super().__init__()
        self.network = keras.layers.Dense(2)
        self.network.build((None, 4))

    def call(self, y_true, y_pred):
        return keras.ops.mean(self.network(y_true - y_pred), axis=-1)


def test_layers_of_a_loss():
    model, loss = gans.Two(), Perceptual()
    model.build((None, 4))
    model.compile("adam", loss)
    found = map(id, keras_saveables.layer_variables(model))
    expected = map(id, [*model.variables, *loss.network.variables])
    assert sorted(found) == sorted(expected)


def test_metrics_of_a_model_inside_of_another():
    model = gans.made()
    inner = keras.metrics.MeanAbsoluteError()
    model.g.compile("adam", "mse", metrics=[inner])
    model.g.fit(gans.X, np.zeros((20, 5)), verbose=0)
    found = keras_saveables.all_metrics(model)
    # That of `compile` has it, and updates it.
    assert not any(each is inner for each in found)
    variables = [id(v) for each in found for v in each.variables]
    assert [variables.count(id(v)) for v in inner.variables] == [1, 1]


def in_a_set(model):
    model.optimizers = {gans.adam()}


def behind_a_property(model):
    optimizer = gans.adam()
    type(model).hidden = property(lambda self: {"a": optimizer})


@pytest.mark.parametrize(
    ("hide", "place"),
    [
        (in_a_set, "`model.optimizers[0]`"),
        (behind_a_property, "`model.hidden['a']`"),
    ],
)
def test_what_could_not_be_restored_is_not_saved(hide, place):
    class Own(gans.Two):
        pass

    model = Own()
    keras_saveables.check_found(model)
    hide(model)
    with pytest.raises(keras_dist.UnsupportedModelError) as raised:
        keras_saveables.check_found(model)
    assert place in str(raised.value)
    assert "Optimizer 'adam" in str(raised.value)
