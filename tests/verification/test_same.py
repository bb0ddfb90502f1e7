"""`strategy.verify` says `same` of models that are, and changes nothing."""

import json
import random

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_saveables
from keras_dist.verification.batches import Batch
from keras_dist.verification.batches import batches_of
from keras_dist.verification.report import Report
from parity import harness
from sharded.helpers import shards
from verification import models
from verification import steps
from verification.models import TARGETS
from verification.models import X
from verification.models import Y

STRATEGIES = {
    "mirrored": harness.strategy,
    "central": harness.central,
    "one_device": lambda _: keras_dist.OneDeviceStrategy("cpu:0"),
}


def mirrored():
    return keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.parametrize(
    "kind", [*STRATEGIES, pytest.param("sharded", marks=shards)]
)
def test_a_model_with_batch_statistics_and_dropout_is_the_same(kind):
    strategy = STRATEGIES.get(kind, harness.sharded)(3)
    with strategy.scope():
        model = models.classifier()
    report = strategy.verify(model, X, Y, steps=3 if kind == "mirrored" else 2)
    assert report.same, report
    kinds = {each.kind for each in report.differences}
    assert kinds == {
        *("prediction", "loss", "metric", "gradient"),
        *("state", "weight", "slot"),
    }
    phases = [each.phase for each in report.differences]
    assert list(dict.fromkeys(phases)) == [
        *("predict", "evaluate", "gradients", "training", "fit")
    ]
    assert any(rows % 2 for rows in report.batches)
    assert len({each.name for each in report.differences}) > 20
    report.raise_if_different()


def _of_tokens():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(12, 4, mask_zero=True),
            keras.layers.GRU(4),
            keras.layers.Dense(2, dtype="float32"),
        ]
    )
    model.compile("adam", "mse")
    keras.config.set_dtype_policy(before)
    return model


WEIGHTS = np.linspace(0.1, 2.0, 40, dtype="float32")
# What it is given, and names that it compares.
SAME = {
    "several outputs": (
        lambda: (models.two_outputs(), X, [TARGETS, TARGETS[::-1]]),
        {"sample_weight": WEIGHTS, "batch_size": 6},
        {"one_loss", "two_loss", "loss"},
    ),
    "class weights": (
        lambda: (models.classifier("sgd"), X, Y),
        {"class_weight": {0: 5.0, 1: 1.0, 2: 0.1}},
        {"loss", "accuracy"},
    ),
    "two optimizers": (lambda: (steps.adversarial, X), {}, {"critic_loss"}),
    "tokens": (lambda: (_of_tokens, models.TOKENS, TARGETS), {}, {"loss"}),
}


@pytest.mark.parametrize("name", SAME)
def test_models_that_are_the_same(name):
    make, options, names = SAME[name]
    report = mirrored().verify(*make(), steps=2, **options)
    assert report.same, report
    assert names <= {each.name for each in report.differences}
    gradients = [d for d in report.differences if d.kind == "gradient"]
    assert len(gradients) == 6 or name != "two optimizers"


@pytest.mark.parametrize("copied", [True, False], ids=["model", "function"])
def test_a_subclass_that_draws_is_the_same(copied):
    strategy = mirrored()
    model = models.variational
    if copied:
        model = model()
        model.predict(X, verbose=0)
    batches = [(X[:8], X[:8]), (X[8:14], X[8:14])]
    report = strategy.verify(model, batches)
    assert report.same, report
    # The last one is cut, or nothing would be uneven.
    assert report.batches == (8, 5)


def _state(model):
    return [
        np.array(keras.ops.convert_to_numpy(v))
        for v in keras_saveables.all_variables(model)
    ]


@pytest.mark.parametrize("trained", [True, False])
def test_the_model_and_random_states_are_left_as_they_were(trained):
    strategy = mirrored()
    with strategy.scope():
        model = models.classifier()
    if trained:
        model.fit(X, Y, batch_size=10, verbose=0)
    functions = (model.train_function, model.test_function)
    attributes = set(vars(model))
    before, python = _state(model), random.getstate()
    numpy_state = np.random.get_state()[1].tolist()
    draw = keras.random.SeedGenerator.next
    names = keras_internals.name_counts()
    optimizer = model.optimizer
    assert strategy.verify(model, X, Y, steps=1).same
    after = _state(model)
    assert len(after) == len(before)
    for own, others in zip(after, before, strict=True):
        np.testing.assert_array_equal(own, others)
    assert (model.train_function, model.test_function) == functions
    assert set(vars(model)) == attributes
    assert model.optimizer is optimizer
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == numpy_state
    assert keras.random.SeedGenerator.next is draw
    assert keras_internals.name_counts() == names
    assert not keras_dist.has_strategy()
    model.fit(X, Y, batch_size=10, verbose=0)


def test_the_copies_start_with_the_state_of_the_model():
    strategy = mirrored()
    with strategy.scope():
        model = models.regressor(keras.optimizers.Adam(0.1))
    model.fit(X, TARGETS, batch_size=10, verbose=0)
    expected = model.evaluate(X[:5], TARGETS[:5], verbose=0, batch_size=5)
    report = strategy.verify(model, X, TARGETS, batch_size=5, steps=1)
    (loss,) = [d for d in report.differences if d.phase == "evaluate"]
    assert loss.one_device == pytest.approx(expected, rel=1e-5)
    counts = [d for d in report.differences if d.name.endswith("/iteration")]
    assert [count.one_device for count in counts] == [5.0, 5.0]


@pytest.mark.parametrize(
    ("num_replicas", "size", "steps", "expected"),
    [
        (2, 8, 1, (8, 7)),
        (2, 7, 1, (7,)),
        (2, 7, 2, (7, 5)),
        (2, 1, 2, (1, 1)),
        (3, 6, 1, (6, 5)),
        (3, 5, 3, (5, 4, 2)),
        (3, 4, 3, (4, 2, 2)),
        (1, 4, 3, (4, 3, 1)),
        (1, 4, 1, (4,)),
    ],
)
def test_uneven_batches_are_uneven_for_the_replicas(
    num_replicas, size, steps, expected
):
    found = batches_of(X, Y, None, None, size, steps, num_replicas)
    assert tuple(batch.rows for batch in found) == expected


def test_an_uneven_batch_is_added_and_the_report_is_read_from_json():
    report = mirrored().verify(models.regressor(), X, TARGETS, steps=1)
    assert report.same, report
    assert report.batches == (8, 7)
    assert {d.rows for d in report.differences if d.phase == "evaluate"} == {7}
    found = json.loads(report.to_json())
    assert found["same"] and found["first"] is None and not found["by_layer"]
    assert Report.from_dict(found) == report
    assert "same" in str(report)
    assert "same" in report._repr_mimebundle_((), ())["text/html"]
    assert report.section == ""


def test_a_report_says_that_no_batch_was_uneven(monkeypatch):
    # Rows of some data, such as sparse tensors, can't be taken out.
    monkeypatch.setattr(Batch, "with_rows", lambda self, index: None)
    data = [(X[:8], TARGETS[:8])]
    report = mirrored().verify(models.regressor(), data)
    assert report.same, report
    assert "uneven batches were not compared" in "".join(report.notes)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_gradient_that_is_zero_is_not_blamed(optimizer):
    """The bias of attention's keys has one, but for rounding."""
    inputs = keras.Input((5, 6))
    x = keras.layers.MultiHeadAttention(2, 3, dropout=0.1)(inputs, inputs)
    x = keras.layers.LayerNormalization()(x + inputs)
    outputs = keras.layers.Dense(2)(keras.layers.Flatten()(x))
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, "mse")
    rows = np.random.default_rng(5).normal(size=(20, 5, 6)).astype("float32")
    report = mirrored().verify(model, rows, TARGETS[:20], steps=2)
    assert report.same, report
    assert "key/bias" in "".join(report.notes)


def test_a_model_of_a_users_own_classes_is_copied():
    class Halved(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1 / (1.0 + keras.ops.cast(step, "float32"))

        def get_config(self):
            return {}

    class Scaled(keras.metrics.MeanAbsoluteError):
        pass

    class Own(keras.layers.Layer):
        def __init__(self, factor, **kwargs):
            super().__init__(**kwargs)
            self.factor = factor

        def call(self, x):
            return x * self.factor

    def squared(y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)

    model = models.regressor(layer=Own(0.5))
    model.get_layer("first").trainable = False
    model.compile(
        keras.optimizers.Adam(Halved()),
        squared,
        metrics=[Scaled(name="scaled"), squared],
    )
    strategy = keras_dist.OneDeviceStrategy("cpu:0")
    report = strategy.verify(model, X, TARGETS, steps=2)
    assert report.same, report
    gradients = [d.name for d in report.differences if d.kind == "gradient"]
    assert gradients == ["last/kernel", "last/bias"]
    assert {d.name for d in report.differences if d.kind == "metric"} == {
        "scaled",
        "squared",
    }
