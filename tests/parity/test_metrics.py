"""Every metric gives one device's value, at each batch and at epoch end."""

import inspect

import keras
import numpy as np
import pytest
from keras import layers
from keras import metrics
from keras import ops

from parity.harness import BACKEND
from parity.harness import JIT
from parity.harness import assert_same
from parity.harness import flat
from parity.harness import scope
from parity.harness import set_initial_weights

# Batches of one shape: these steps take long to compile.
ROWS, BATCH_SIZE, CLASSES = 21, 7, 4


class Largest(metrics.Metric):
    """The largest prediction so far; its first state is minus infinity."""

    def __init__(self, name="largest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.value = self.add_variable((), _minus_infinity, name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.max(y_pred)))

    def result(self):
        # On JAX, Keras takes no variable here.
        return self.value.value if BACKEND == "jax" else self.value

    def reset_state(self):
        self.value.assign(-np.inf)


def _minus_infinity(shape, dtype=None):
    return ops.full(shape, -np.inf, dtype)


def _absolute(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred), axis=-1)


# What each metric is measured on: an output of the model below.
REGRESSION = [
    lambda: metrics.ConcordanceCorrelation(axis=-1),
    metrics.CosineSimilarity,
    metrics.KLDivergence,
    metrics.LogCoshError,
    metrics.MeanAbsoluteError,
    metrics.MeanAbsolutePercentageError,
    lambda: metrics.MeanMetricWrapper(_absolute, name="wrapped"),
    metrics.MeanSquaredError,
    metrics.MeanSquaredLogarithmicError,
    lambda: metrics.PearsonCorrelation(axis=-1),
    metrics.Poisson,
    lambda: metrics.R2Score(class_aggregation="variance_weighted_average"),
    metrics.RootMeanSquaredError,
    Largest,
]
BINARY = [
    lambda: metrics.AUC(num_thresholds=20),
    lambda: metrics.AUC(num_thresholds=20, curve="PR", name="auc_pr"),
    metrics.BinaryAccuracy,
    metrics.BinaryCrossentropy,
    lambda: metrics.BinaryIoU(target_class_ids=[0, 1], threshold=0.5),
    metrics.FalseNegatives,
    metrics.FalsePositives,
    metrics.Hinge,
    lambda: metrics.Precision(thresholds=0.4),
    lambda: metrics.PrecisionAtRecall(0.5, num_thresholds=20),
    lambda: metrics.Recall(thresholds=0.6),
    lambda: metrics.RecallAtPrecision(0.5, num_thresholds=20),
    lambda: metrics.SensitivityAtSpecificity(0.5, num_thresholds=20),
    lambda: metrics.SpecificityAtSensitivity(0.5, num_thresholds=20),
    metrics.SquaredHinge,
    metrics.TrueNegatives,
    metrics.TruePositives,
]
ONE_HOT = [
    lambda: metrics.AUC(num_thresholds=20, multi_label=True, name="auc_each"),
    metrics.CategoricalAccuracy,
    metrics.CategoricalCrossentropy,
    metrics.CategoricalHinge,
    lambda: metrics.F1Score(average="macro"),
    lambda: metrics.FBetaScore(average="weighted", beta=0.5, threshold=0.3),
    lambda: metrics.OneHotIoU(num_classes=CLASSES, target_class_ids=[0, 2]),
    lambda: metrics.OneHotMeanIoU(num_classes=CLASSES),
    lambda: metrics.Precision(top_k=2, name="precision_top_2"),
    lambda: metrics.TopKCategoricalAccuracy(k=2),
]
SPARSE = [
    metrics.SparseCategoricalAccuracy,
    metrics.SparseCategoricalCrossentropy,
    lambda: metrics.SparseTopKCategoricalAccuracy(k=2),
    lambda: metrics.MeanIoU(
        num_classes=CLASSES, sparse_y_pred=False, name="mean_iou"
    ),
    lambda: metrics.IoU(
        num_classes=CLASSES, target_class_ids=[1], sparse_y_pred=False
    ),
]
# Labels against labels: the model's own rounded input comes back.
LABELS = [metrics.Accuracy]
TABLE = {
    "regression": REGRESSION,
    "binary": BINARY,
    "one_hot": ONE_HOT,
    "sparse": SPARSE,
    "labels": LABELS,
}
# Not measured between targets and predictions; `test_steps.py` has them.
NOT_COMPILED = {"Metric", "Mean", "Sum"}


def test_the_table_has_every_metric():
    known = {
        name
        for name, value in vars(metrics).items()
        if inspect.isclass(value) and issubclass(value, metrics.Metric)
    }
    tested = {type(make()).__name__ for row in TABLE.values() for make in row}
    assert tested - {"Largest"} == known - NOT_COMPILED


def _model():
    x = layers.Input((6,), name="x")
    hidden = layers.Dense(5, activation="tanh")(x)
    return keras.Model(
        x,
        {
            "regression": layers.Dense(3, activation="softplus")(hidden),
            "binary": layers.Dense(1, activation="sigmoid")(hidden),
            "one_hot": layers.Dense(CLASSES, activation="softmax")(hidden),
            "sparse": layers.Dense(CLASSES, activation="softmax")(hidden),
            "labels": layers.Activation(lambda t: ops.round(t[:, :1]))(x),
        },
    )


def _data():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, (ROWS, 1))
    return rng.normal(size=(ROWS, 6)).astype("float32"), {
        "regression": rng.uniform(0.1, 2, (ROWS, 3)).astype("float32"),
        "binary": rng.integers(0, 2, (ROWS, 1)).astype("float32"),
        "one_hot": np.eye(CLASSES, dtype="float32")[labels[:, 0]],
        "sparse": labels,
        "labels": rng.integers(-1, 2, (ROWS, 1)).astype("float32"),
    }


def _weights():
    rng = np.random.default_rng(1)
    return {name: rng.integers(0, 4, ROWS).astype("float32") for name in TABLE}


def _logs(num_replicas, weighted):
    """Logs of each batch, of the epoch and of `evaluate`."""
    keras.utils.clear_session()  # Some metrics' names are counted.
    keras.utils.set_random_seed(3)
    with scope(num_replicas):
        model = set_initial_weights(_model())
        made = {name: [make() for make in row] for name, row in TABLE.items()}
        model.compile(
            "sgd",
            {
                "regression": "mse",
                "binary": "binary_crossentropy",
                "one_hot": "categorical_crossentropy",
                "sparse": "sparse_categorical_crossentropy",
                "labels": None,
            },
            jit_compile=JIT,
            **{"weighted_metrics" if weighted else "metrics": made},
        )
    seen = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(dict(logs)),
        on_epoch_end=lambda epoch, logs: seen.append(dict(logs)),
    )
    record.on_test_batch_end = lambda batch, logs: seen.append(dict(logs))
    x, y = _data()
    options = {"batch_size": BATCH_SIZE, "verbose": 0, "callbacks": [record]}
    if weighted:
        options["sample_weight"] = _weights()
    model.fit(x, y, epochs=1, shuffle=False, **options)
    seen.append(model.evaluate(x, y, return_dict=True, **options))
    return flat("logs", seen)


_plain_logs = {}


@pytest.mark.filterwarnings(
    # Keras' own: of the IoU metrics, and of `SparseTopK...` on JAX.
    "ignore:You are passing weight as `float`",
    "ignore:Explicitly requested dtype int64",
)
@pytest.mark.parametrize(
    ("num_replicas", "weighted"),
    [
        pytest.param(3, False, marks=pytest.mark.smoke),
        (2, True),
        *([(2, False), (4, False)] if BACKEND == "torch" else []),
    ],
)
def test_same_logs(num_replicas, weighted):
    if weighted not in _plain_logs:
        _plain_logs[weighted] = _logs(None, weighted)
    expected = _plain_logs[weighted]
    assert len(expected) > 8 * 40
    assert_same(_logs(num_replicas, weighted), expected)
