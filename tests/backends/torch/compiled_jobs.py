"""Jobs of workers that compile their training step."""

import contextlib
import gc
import warnings
import weakref

import keras
import numpy as np
import torch
from keras import layers
from torch._dynamo.utils import counters

import keras_dist
from keras_dist_torch import compiled_training
from parity import models
from parity.harness import fitted
from parity.harness import set_initial_weights
from parity.harness import state_of

# Full batches of 8 rows and one of 5: on two workers, 4 and 4, and 3 and 2.
ROWS, BATCH_SIZE = 29, 8
X, Y, WEIGHTS = models.weighted_table(ROWS).values()
NOT_COMPILED = "is not compiled"


class Scaled(layers.Layer):
    """Multiplies by an attribute that a callback changes."""

    factor = 1.0

    def call(self, inputs):
        return inputs * self.factor


class Counter(layers.Layer):
    """Counts its calls in a variable."""

    def build(self, input_shape):
        self.calls = self.add_weight(initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign(self.calls + 1)
        return inputs


class Ignored(layers.Layer):
    """Draws a mask that nothing uses, and drops more when it is told to."""

    drops = False

    def __init__(self):
        super().__init__()
        self.dropout = layers.Dropout(0.4)

    def call(self, inputs, training=False):
        dropped = self.dropout(inputs, training=training)
        if self.drops:
            return self.dropout(dropped, training=training)
        return inputs


class LateCounter(Counter):
    """Counts its calls once it is told to."""

    counts = False

    def call(self, inputs):
        return super().call(inputs) if self.counts else inputs


class TwiceTheLoss(keras.optimizers.SGD):
    def scale_loss(self, loss):
        return 2 * loss


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        return super().train_step(data)


def sequence(*stack):
    return keras.Sequential([keras.Input((4,)), *stack])


def rich():
    """A model with what a graph has to treat in a way of its own."""
    inputs = keras.Input((4,))
    shared = keras.regularizers.L2(0.01)
    hidden = layers.Dense(6, "tanh", activity_regularizer=shared)(inputs)
    hidden = layers.BatchNormalization()(hidden)
    hidden = layers.Dropout(0.3)(models.RowPenalty()(hidden))
    hidden = layers.Dense(
        5, "relu", activity_regularizer=shared, name="second"
    )(hidden)
    hidden = Scaled(name="scaled")(hidden)
    hidden = layers.Dropout(0.2)(hidden)
    return keras.Model(inputs, layers.Dense(1)(Ignored()(hidden)))


def padded():
    """A model whose loss leaves out masked places, and its data."""
    inputs = keras.Input((5,), dtype="int32")
    hidden = layers.Embedding(7, 4, mask_zero=True)(inputs)
    outputs = layers.Dense(1)(layers.Dense(3, "relu")(hidden))
    rng = np.random.default_rng(2)
    data = {
        "x": rng.integers(0, 7, (ROWS, 5)),
        "y": rng.normal(size=(ROWS, 5, 1)).astype("float32"),
    }
    return keras.Model(inputs, outputs), data


class Changes(keras.callbacks.Callback):
    """Changes what a graph has seen."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            self.model.optimizer.learning_rate = 0.01
            self.model.get_layer("scaled").factor = 0.5
            layer = self.model.get_layer("second")
            layer.activity_regularizer = keras.regularizers.L2(0.5)


def scope(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def strategy_of(is_plain):
    return None if is_plain else keras_dist.MultiWorkerMirroredStrategy()


def count_graphs():
    """Begins to count the graphs of a model."""
    compiled_training.problem_of_compiler(torch.device("cpu"))
    counters.clear()


def num_graphs():
    return counters["stats"]["unique_graphs"]


def train_rich(is_plain):
    """Trains for some epochs, and then some more; the graphs of each."""
    with scope(strategy_of(is_plain)):
        model = set_initial_weights(rich())
        model.compile(
            keras.optimizers.Adam(0.05, global_clipnorm=0.5, use_ema=True),
            "mse",
            metrics=["mae"],
            weighted_metrics=["mse"],
            jit_compile=not is_plain,
        )
    count_graphs()
    graphs, results = [], []
    keras.utils.set_random_seed(4)
    for epochs, callbacks in (3, [Changes()]), (2, []):
        results.append(
            fitted(
                model,
                X,
                Y,
                sample_weight=WEIGHTS,
                batch_size=BATCH_SIZE,
                epochs=epochs,
                callbacks=callbacks,
                validation_data=(X, Y),
                verbose=0,
            )
        )
        graphs.append(num_graphs())
    breaks = sum(counters["graph_break"].values())
    # The generators go on as they do in one process.
    return results, graphs, breaks, float(torch.rand(()))


def train_padded(is_plain):
    strategy = strategy_of(is_plain)
    with scope(strategy):
        model, data = padded()
        set_initial_weights(model)
        rate = keras.optimizers.schedules.CosineDecay(
            0.1, 12, warmup_target=0.15, warmup_steps=3
        )
        optimizer = TwiceTheLoss(rate, momentum=0.9)
        model.compile(
            optimizer, "mse", metrics=["mae"], jit_compile=not is_plain
        )
    count_graphs()
    keras.utils.set_random_seed(4)
    options = {"batch_size": BATCH_SIZE, "epochs": 3, "verbose": 0}
    results = fitted(model, **data, **options)
    return results, num_graphs(), sum(counters["graph_break"].values())


def train_batches(is_plain):
    """Trains batches of arrays: of several shapes, and some layers frozen."""
    with scope(strategy_of(is_plain)):
        model = set_initial_weights(sequence(*map(layers.Dense, (3, 1))))
        model.compile("sgd", "mse", jit_compile=not is_plain)
    count_graphs()
    graphs, losses = [], []
    for is_frozen in False, True, False:
        model.layers[0].trainable = not is_frozen
        for rows in (8, 8, 8, 8, 6, 8, 1, 1, 1, 6):
            losses.append(model.train_on_batch(X[:rows], Y[:rows]))
            model.reset_metrics()
        graphs.append(num_graphs())
    return state_of(model) | {"losses": np.array(losses)}, graphs


def train_and_forget():
    """Trains a model; the model, once it is not used any more."""
    with scope(strategy_of(False)):
        model = one()
        model.compile("sgd", "mse", jit_compile=True)
    count_graphs()
    model.fit(X, Y, batch_size=BATCH_SIZE, verbose=0)
    assert num_graphs()
    found = weakref.ref(model)
    del model
    gc.collect()
    return found() is None


def change_later(layer, name):
    """Trains a layer that goes another way after some steps; the error."""
    with scope(strategy_of(False)):
        model = sequence(layer, layers.Dense(1))
        model.compile("sgd", "mse", jit_compile=True)
    model.fit(X, Y, batch_size=BATCH_SIZE, verbose=0)
    setattr(model.layers[0], name, True)
    try:
        model.fit(X, Y, batch_size=BATCH_SIZE, verbose=0)
    except (keras_dist.UnsupportedModelError, RuntimeError) as error:
        return str(error)
    return ""


def assign_later():
    return change_later(LateCounter(), "counts")


def draw_later():
    return change_later(Ignored(), "drops")


def softmax():
    return sequence(layers.Dense(3, "softmax"))


def one():
    return sequence(layers.Dense(1))


def recomputed():
    with keras.RematScope(mode="full"):
        blocks = layers.Dense(4, "tanh"), layers.Dropout(0.5)
    return sequence(*blocks, layers.Dense(1))


def sgd(**options):
    return keras.optimizers.SGD(0.05, **options)


# A model, its optimizer, options of `compile`, and why its step can't be
# compiled.
EAGER = {
    "own step": (OwnStep, sgd, {}, "your own"),
    "metric": (
        one,
        sgd,
        {"metrics": [keras.metrics.R2Score()]},
        "the metrics 'compile_metrics'",
    ),
    "loss": (softmax, sgd, {"loss": keras.losses.Dice()}, "loss 'dice'"),
    "seeded": (
        lambda: sequence(layers.Dropout(0.5, seed=1), layers.Dense(1)),
        sgd,
        {},
        "random numbers",
    ),
    "noise": (
        lambda: sequence(layers.GaussianNoise(0.5), layers.Dense(1)),
        sgd,
        {},
        "random numbers",
    ),
    "recomputed": (recomputed, sgd, {}, "computes activations again"),
    "counter": (
        lambda: sequence(Counter(), layers.Dense(1)),
        sgd,
        {},
        "assigns variables",
    ),
    "accumulation": (
        one,
        lambda: sgd(gradient_accumulation_steps=2),
        {},
        "gradient_accumulation_steps",
    ),
    "averages": (
        one,
        lambda: sgd(use_ema=True, ema_overwrite_frequency=2),
        {},
        "ema_overwrite_frequency",
    ),
    "scaled loss": (
        one,
        lambda: keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=4.0),
        {},
        "LossScaleOptimizer",
    ),
}


def run_eager(name, is_plain):
    """Trains a model that is not compiled; the warnings, too."""
    build, make_optimizer, options, _ = EAGER[name]
    keras.utils.set_random_seed(4)
    with scope(strategy_of(is_plain)):
        model = build()
        outputs = model(X[:1])
        set_initial_weights(model)
        options = {"loss": "mse", "jit_compile": not is_plain} | options
        model.compile(make_optimizer(), **options)
    y = Y if outputs.shape[-1] == 1 else np.repeat(Y, 3, axis=1) > 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = fitted(
            model,
            X,
            y.astype("float32"),
            batch_size=BATCH_SIZE,
            epochs=2,
            verbose=0,
        )
    return results, [str(each.message) for each in caught]


def without_compiler(worker):
    """Trains where one worker has no compiler; what workers warn of."""
    import torch._inductor.config

    strategy = keras_dist.MultiWorkerMirroredStrategy()
    cpp = torch._inductor.config.cpp
    before = cpp.cxx
    compiled_training.problem_of_compiler.cache_clear()
    try:
        if strategy.executor.workers.cluster.index == worker:
            cpp.cxx = ("/no/compiler",)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results, graphs = train_batches(is_plain=False)
    finally:
        cpp.cxx = before
        compiled_training.problem_of_compiler.cache_clear()
    told = [str(each.message) for each in caught]
    return results, graphs, [text for text in told if NOT_COMPILED in text]
