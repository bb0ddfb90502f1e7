"""`strategy.verify` names what differs first, and the likely cause.

The models differ on purpose: they are made in another way in the scope, or
couple rows where no replica has the others', or part of keras_dist is taken
out. So the tests don't depend on a defect that will be mended.
"""

import functools
import json

import keras
import numpy as np
import pytest
from keras import ops

import keras_dist
from keras_dist.core.rows import scaled_gradient
from keras_dist.fit.metrics import MetricUpdate
from keras_dist.replica.state import ReplicaState
from keras_dist.verification.report import Report
from verification import models
from verification.models import TARGETS
from verification.models import X

IN_REPLICAS = pytest.mark.only_on(
    "tensorflow",
    "torch",
    reason="On JAX a step of `fit` has all rows at once.",
)


def verify(model, x=X, y=TARGETS, **options):
    options.setdefault("steps", 2)
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    return strategy.verify(model, x, y, **options)


def is_wrong():
    """Whether the model is made under the strategy."""
    return keras_dist.has_strategy()


class Scales(keras.layers.Layer):
    """Multiplies what it is given, or its gradients, where it is wrong."""

    def __init__(self, forward=1.0, backward=1.0):
        super().__init__(name="scales")
        self.factors = (forward, backward) if is_wrong() else (1.0, 1.0)

    def call(self, x):
        forward, backward = self.factors
        return scaled_gradient(x * forward, backward)


class Counts(keras.layers.Layer):
    """Counts the rows of all batches."""

    def __init__(self):
        super().__init__(name="counts")
        self.each = 0.5 if is_wrong() else 1.0

    def build(self, shape):
        self.seen = self.add_weight((), "zeros", trainable=False, name="seen")

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(self.each * 8)
        return x


def _metric():
    def absolute(y_true, y_pred):
        error = ops.mean(ops.abs(y_true - y_pred), axis=-1)
        return 2.0 * error if wrong else error

    wrong = is_wrong()
    model = models.regressor()
    model.compile("sgd", "mse", metrics=[absolute])
    return model


def _optimizer():
    clip = 1e-3 if is_wrong() else None
    return models.regressor(keras.optimizers.SGD(clipvalue=clip))


def _table():
    """An embedding, whose rows an optimizer gets in another way."""
    clip = 1e-3 if is_wrong() else None
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(12, 4, name="tokens"),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2, name="last"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1, clipvalue=clip), "mse")
    return model


def _long_fit():
    """Trains twice in the one `fit` that is not told its epochs."""
    model = models.regressor()
    if is_wrong():
        model.fit = functools.partial(model.fit, epochs=2)
    return model


def _loss():
    return models.regressor(loss="mae" if is_wrong() else "mse")


CASES = {
    "prediction": (
        lambda: models.regressor(layer=Scales(forward=2.0)),
        ("prediction", "output 0", "predict"),
    ),
    "loss": (_loss, ("loss", "loss", "evaluate")),
    "metric": (_metric, ("metric", "absolute", "evaluate")),
    "gradient": (
        lambda: models.regressor(layer=Scales(backward=0.5)),
        ("gradient", "first/kernel", "gradients"),
    ),
    "state": (
        lambda: models.regressor(layer=Counts()),
        ("state", "counts/seen", "gradients"),
    ),
    "weight": (_optimizer, ("weight", "first/kernel", "training")),
    "fit": (_long_fit, ("weight", "first/kernel", "fit")),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_thing_that_differs_is_named(name):
    make, expected = CASES[name]
    report = verify(make)
    first = report.first
    assert (first.kind, first.name, first.phase) == expected, report
    assert not report.same
    assert report.section == "The numbers differ"
    assert first.name in str(report).replace("\n", "")
    with pytest.raises(keras_dist.NumbersDifferError, match=first.name):
        report.raise_if_different()
    if name == "gradient":
        # Behind the layer nothing is wrong.
        assert {path for path, _ in report.by_layer} == {
            "first/kernel",
            "first/bias",
        }
        assert first.relative == pytest.approx(0.5, rel=1e-3)
        assert first.strategy == pytest.approx(first.one_device / 2, rel=1e-3)
    if name == "state":
        assert (first.one_device, first.strategy) == (8.0, 4.0)


def _another_metric(side):
    def make():
        model = models.regressor()
        metrics = ["mae"] if is_wrong() == (side == "strategy") else []
        model.compile("sgd", "mse", metrics=metrics)
        return model

    return make


@pytest.mark.parametrize("side", ["strategy", "one_device"])
def test_a_log_of_one_side_only_is_a_difference(side):
    report = verify(_another_metric(side), steps=1)
    first = report.first
    assert (first.kind, first.name, first.only) == ("metric", "mae", side)
    assert report.cause.name == "a value of one side"
    assert np.isfinite(getattr(first, side))
    with pytest.raises(keras_dist.NumbersDifferError, match="and no such"):
        report.raise_if_different()
    read = Report.from_dict(json.loads(report.to_json()))
    assert (read.first.only, read.same) == (side, False)


def test_embeddings_are_known_to_have_sparse_gradients():
    report = verify(_table, models.TOKENS)
    assert (report.first.kind, report.first.phase) == ("weight", "training")
    assert report.first.name.endswith("tokens/embeddings")
    assert report.cause.name == "sparse gradients"


@IN_REPLICAS
@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (models.CentresRows, ("prediction", "output 0", "predict")),
        (models.CentresTraining, ("loss", "loss", "gradients")),
    ],
)
def test_a_layer_that_couples_rows_is_found(layer, expected):
    first = (report := verify(lambda: models.regressor(layer=layer()))).first
    assert (first.kind, first.name, first.phase) == expected, report
    assert report.cause.name == "rows coupled in a layer"


class PoolsRows(keras.layers.Layer):
    """Takes the largest of windows of rows, which overlap."""

    def call(self, x):
        rows = ops.reshape(x, (1, -1, x.shape[-1], 1))
        largest = ops.max_pool(rows, (3, 1), (1, 1), padding="same")
        return ops.reshape(largest, (-1, x.shape[-1]))


@pytest.mark.only_on("jax", reason="Others see only their own rows.")
def test_an_operation_that_the_compiler_divides_wrongly():
    report = verify(
        lambda: models.regressor(layer=PoolsRows()), X[:8], TARGETS[:8]
    )
    assert report.first.kind == "gradient"
    assert report.cause.name == "an operation that the compiler divides"


class AddsASum(keras.layers.Layer):
    def __init__(self):
        super().__init__(name="adds")

    def call(self, x):
        self.add_loss(0.1 * ops.sum(ops.square(x)))
        return x


class SumsInALoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        return ops.sum(ops.square(y - y_pred))


@IN_REPLICAS
@pytest.mark.parametrize(
    "options", [{"layer": AddsASum}, {"cls": SumsInALoss}], ids=["add", "step"]
)
def test_a_sum_that_is_not_written_as_one_is_found(options):
    def make():
        made = {"layer": options["layer"]()} if "layer" in options else options
        return models.regressor(**made)

    report = verify(make)
    assert (report.first.kind, report.cause.name) == ("loss", "a sum over rows")
    assert "keras_dist.sum_over_rows" in report.cause.text
    adds = "'adds' calls `add_loss`" in report.cause.text
    assert adds is ("layer" in options)


@IN_REPLICAS
def test_gradients_in_wrong_shares_are_found(monkeypatch):
    def unweighted(self, gradients, shares, variables, numbers=()):
        ones = [1.0] * len(shares)
        return self.runner.sum_gradients(
            self.replica, gradients, ones, variables, numbers
        )

    monkeypatch.setattr(ReplicaState, "sum_gradients", unweighted)
    report = verify(lambda: models.regressor())
    assert report.first.kind == "gradient"
    assert report.first.relative == pytest.approx(1.0, rel=1e-3)
    assert len(report.by_layer) == 4


@IN_REPLICAS
def test_metrics_that_see_a_replicas_rows_are_found(monkeypatch):
    model = models.regressor()
    model.compile("sgd", "mse", metrics=["mae"])
    run = MetricUpdate.run
    monkeypatch.setattr(
        MetricUpdate, "run", lambda self, all_: run(self, all_[:1])
    )
    report = verify(model, steps=1)
    different = {each.kind for each in report.differences if each.differs}
    assert different == {"metric"}


def test_numbers_that_nobody_can_repeat_are_called_random():
    state = np.random.default_rng(0)

    class Noise(keras.layers.Layer):
        def call(self, x):
            return x * float(state.uniform(0.5, 1.5))

    def make():
        model = models.regressor(layer=Noise())
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    report = verify(make, steps=1)
    assert not report.same
    assert report.cause.name == "randomness"
