"""The parity table: what must give the same numbers on any replica count."""

import functools

from keras import layers
from keras import losses
from keras import optimizers

from keras_versions import TAKES_SEVERAL_STEPS
from parity import models
from parity.harness import BACKENDS
from parity.harness import Case

ALL = (1, 2, 3, 4)
# Those that run several steps in one execution.
OF_SEVERAL_STEPS = BACKENDS if TAKES_SEVERAL_STEPS else ("jax", "tensorflow")


def sgd(**options):
    return optimizers.SGD(**{"learning_rate": 0.1, **options})


def with_(optimizer=sgd, loss="mse", **options):
    """Arguments of `compile`; objects are made anew for each model."""

    def make():
        made = {
            name: value() if isinstance(value, functools.partial) else value
            for name, value in options.items()
        }
        chosen = loss() if isinstance(loss, functools.partial) else loss
        return {"optimizer": optimizer(), "loss": chosen, **made}

    return make


new = functools.partial
mse = with_()


def weighted(name, compile, **options):
    """A row for a small model, on data of uneven weights."""
    return Case(name, models.mlp, models.weighted_table, compile, **options)


CORE = [
    Case(
        "weighted",
        models.classifier,
        models.weighted_classes,
        with_(
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
            weighted_metrics=["accuracy"],
        ),
        rows=19,
        replicas=ALL,
        full=True,
    ),
    Case(
        "batch_norm_conv_adam",
        models.image(
            lambda: layers.Conv2D(3, 3, use_bias=False),
            layers.BatchNormalization,
            lambda: layers.Activation("tanh"),
            layers.GlobalAveragePooling2D,
            models.dense(),
        ),
        models.images,
        with_(new(optimizers.Adam, 0.01), metrics=["mae"]),
        rows=19,
        replicas=ALL,
        full=True,
        rtol=1e-4,
    ),
    Case(
        "mask_gru",
        models.text(lambda: layers.GRU(3), models.dense()),
        models.words,
        with_(metrics=["mae"]),
        rows=19,
        replicas=ALL,
        full=True,
    ),
    Case(
        "two_headed",
        models.two_headed,
        models.weighted_many,
        with_(
            loss={
                "value": "mse",
                "kind": "sparse_categorical_crossentropy",
                "sign": "binary_crossentropy",
            },
            loss_weights={"value": 0.5, "kind": 2.0, "sign": 1.0},
            metrics={"value": ["mae"], "kind": ["accuracy"]},
        ),
        rows=19,
        replicas=ALL,
        full=True,
    ),
]

BATCHES = [
    Case("even", models.mlp, models.table, mse, 24, 12, replicas=ALL),
    Case("one", models.mlp, models.table, mse, 3, 1, replicas=(2, 3)),
    weighted(
        "fewer_than_replicas",
        mse,
        rows=6,
        batch_size=2,
        replicas=(3, 4),
        full=True,
    ),
    Case(
        "last_of_one",
        models.mlp,
        models.table,
        mse,
        9,
        4,
        replicas=(2, 3, 4),
        full=True,
    ),
    Case(
        "last_of_one_batch_norm",
        models.sequence(
            models.dense(5, use_bias=False),
            layers.BatchNormalization,
            models.dense(),
        ),
        models.table,
        mse,
        9,
        4,
        replicas=(2, 4),
        full=True,
    ),
]


def optimizer(name, make, replicas=(3,), **options):
    """A row for an optimizer."""
    options = {"rtol": 1e-4, "replicas": replicas, **options}
    return weighted(f"optimizer_{name}", with_(make), **options)


OPTIMIZERS = [
    optimizer("momentum", new(sgd, momentum=0.9, nesterov=True), rtol=2e-5),
    optimizer("adam", new(optimizers.Adam, 0.01), (2, 3)),
    optimizer("adamw", new(optimizers.AdamW, 0.01, weight_decay=0.2)),
    optimizer("rmsprop", new(optimizers.RMSprop, 0.01, centered=True), (2,)),
    optimizer(
        "schedule",
        lambda: sgd(
            learning_rate=optimizers.schedules.ExponentialDecay(0.2, 1, 0.7)
        ),
    ),
    optimizer(
        "ema",
        new(
            sgd,
            use_ema=True,
            ema_momentum=0.8,
            ema_overwrite_frequency=4,
        ),
        (2,),
    ),
    optimizer("ema_to_the_end", new(sgd, use_ema=True, ema_momentum=0.8)),
    optimizer("clipnorm", new(sgd, clipnorm=0.05)),
    optimizer("global_clipnorm", new(sgd, global_clipnorm=0.1), (2, 4)),
    optimizer("clipvalue", new(sgd, clipvalue=0.02)),
    optimizer("accumulation", new(sgd, gradient_accumulation_steps=2), (2, 3)),
    optimizer(
        "accumulation_adam_clipped",
        new(
            optimizers.Adam,
            0.01,
            gradient_accumulation_steps=3,
            global_clipnorm=0.1,
        ),
        (3,),
    ),
    optimizer("lamb", new(optimizers.Lamb, 0.01), (2,)),
]


def loss(name, make, build=models.mlp, data=models.weighted_table, **options):
    """A row for a loss, validation included."""
    options = {"replicas": (3,), "full": True, **options}
    return Case(f"loss_{name}", build, data, with_(loss=make), **options)


LOSSES = [
    loss("sum", new(losses.MeanSquaredError, reduction="sum"), replicas=(2, 3)),
    loss(
        "mean",
        new(losses.MeanAbsoluteError, reduction="mean"),
        replicas=(2,),
    ),
    loss(
        "mean_with_sample_weight",
        new(losses.MeanSquaredError, reduction="mean_with_sample_weight"),
        replicas=(2, 3),
    ),
    loss(
        "no_reduction",
        new(losses.MeanSquaredError, reduction=None),
        backends=("tensorflow",),
    ),
    loss(
        "own_call",
        new(models.Contrastive),
        build=models.classifier,
        data=models.classes,
    ),
    loss("function_row_wise", models.row_wise, replicas=(2,)),
    loss("function_row_coupled", models.row_coupled, data=models.table),
    loss(
        "dice",
        new(losses.Dice, axis=None),
        build=models.classifier,
        data=models.one_hot,
    ),
    loss(
        "circle",
        new(losses.Circle),
        build=models.sequence(
            models.dense(5, activation="tanh"),
            models.dense(3),
            layers.UnitNormalization,
        ),
        data=models.classes,
        rtol=1e-4,
    ),
    Case(
        "loss_class_weight",
        models.classifier,
        models.classes,
        with_(loss="sparse_categorical_crossentropy"),
        fit={"class_weight": {0: 0.5, 1: 2.0, 2: 1.0}},
        replicas=(3,),
    ),
    Case(
        "loss_for_one_output",
        models.hidden_too,
        models.table_and_hidden,
        with_(loss={"value": "mse", "hidden": None}),
        replicas=(2,),
    ),
]

MASKS = [
    Case(
        "mask_pooling",
        models.text(layers.GlobalAveragePooling1D, models.dense()),
        models.words,
        mse,
        full=True,
    ),
    Case(
        "mask_of_the_loss",
        models.text(models.dense()),
        models.weighted_tagged_words,
        with_(metrics=["mae"], weighted_metrics=["mse"]),
        replicas=(2, 3),
        full=True,
    ),
    Case(
        "mask_of_the_loss_weighted_mean",
        models.text(models.dense()),
        models.weighted_tagged_words,
        with_(
            loss=new(
                losses.MeanSquaredError, reduction="mean_with_sample_weight"
            )
        ),
        replicas=(3,),
        full=True,
    ),
    Case(
        "mask_batch_norm",
        models.text(
            layers.BatchNormalization,
            layers.GlobalAveragePooling1D,
            models.dense(),
        ),
        models.words,
        mse,
        replicas=(2, 3),
        full=True,
    ),
]


def layer(name, build, data=models.table, compile=mse, **options):
    options = {"replicas": (3,), **options}
    return Case(f"layer_{name}", build, data, compile, **options)


LAYERS = [
    layer(
        "sums_over_rows",
        models.sequence(
            models.dense(5, activation="tanh"), models.RowSums, models.dense()
        ),
        compile=with_(optimizer=new(optimizers.SGD, 0.05)),
        full=True,
    ),
    layer(
        "grouped_convolution",
        models.image(
            lambda: layers.Conv2D(4, 1),
            lambda: layers.Conv2D(4, 3, groups=2),
            layers.GlobalAveragePooling2D,
            models.dense(),
        ),
        data=models.images,
    ),
    layer(
        "regularizers",
        models.sequence(
            models.dense(
                5,
                kernel_regularizer="l2",
                bias_regularizer="l1",
                kernel_constraint="unit_norm",
            ),
            models.dense(activity_regularizer="l2"),
        ),
        data=models.weighted_table,
        full=True,
    ),
    layer(
        "no_numbers",
        models.sequence(models.NoNumbers, models.dense()),
        compile=with_(optimizer=new(optimizers.Adam, 0.05)),
    ),
    layer(
        "add_loss",
        models.sequence(models.dense(5), models.RowPenalty, models.dense()),
        replicas=(2, 3),
        full=True,
    ),
    layer(
        "add_loss_alone",
        models.sequence(models.dense(5), models.RowPenalty),
        compile=with_(loss=None),
        replicas=(2,),
    ),
    layer(
        "batch_norm_momentum",
        models.sequence(
            lambda: layers.BatchNormalization(momentum=0.5),
            models.dense(5, activation="tanh"),
            lambda: layers.BatchNormalization(momentum=0.9, scale=False),
            models.dense(),
        ),
        replicas=(2, 3),
        full=True,
    ),
    layer(
        "batch_norm_renorm",
        models.sequence(
            models.dense(5, use_bias=False),
            lambda: layers.BatchNormalization(renorm=True),
            models.dense(),
        ),
    ),
    layer(
        "normalization",
        models.image(
            lambda: layers.Conv2D(4, 3),
            lambda: layers.GroupNormalization(2),
            layers.LayerNormalization,
            layers.Flatten,
            models.dense(),
        ),
        data=models.images,
        compile=with_(new(sgd, learning_rate=0.01)),
    ),
    layer("attention", models.attention, data=models.words),
    layer(
        "bidirectional",
        models.text(
            lambda: layers.Bidirectional(layers.LSTM(2)), models.dense()
        ),
        data=models.words,
        replicas=(2,),
    ),
    layer(
        "spectral_normalization",
        models.sequence(
            lambda: layers.SpectralNormalization(
                layers.Dense(5, activation="tanh")
            ),
            models.dense(),
        ),
        full=True,
    ),
    layer(
        "dropout_on_one_replica",
        models.sequence(
            models.dense(5), lambda: layers.Dropout(0.5), models.dense()
        ),
        replicas=(1,),
    ),
    layer("frozen", models.frozen),
    layer("nested", models.nested, full=True),
    layer("own_compute_loss", models.own_loss, full=True),
]

MODES = [
    weighted("run_eagerly", with_(run_eagerly=True), replicas=(3,), full=True),
    weighted(
        "steps_per_execution",
        with_(steps_per_execution=2, metrics=["mae"]),
        replicas=(2, 3),
        full=True,
        backends=OF_SEVERAL_STEPS,
    ),
    weighted(
        "mixed_float16",
        with_(
            lambda: optimizers.LossScaleOptimizer(
                sgd(), initial_scale=2.0**10, dynamic_growth_steps=2
            )
        ),
        replicas=(2, 3),
        rtol=5e-3,
        dtype_policy="mixed_float16",
    ),
    Case(
        "loss_scale_overflow",
        models.mlp,
        models.overflowing_table,
        with_(
            lambda: optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**100)
        ),
        replicas=(3,),
    ),
    weighted(
        "mixed_bfloat16",
        mse,
        replicas=(3,),
        rtol=3e-2,
        dtype_policy="mixed_bfloat16",
    ),
]

CASES = CORE + BATCHES + OPTIMIZERS + LOSSES + MASKS + LAYERS + MODES
SMOKE = {
    ("weighted", 3),
    ("batch_norm_conv_adam", 2),
    ("mask_gru", 2),
    ("last_of_one", 4),
    ("fewer_than_replicas", 4),
    ("optimizer_global_clipnorm", 2),
    ("optimizer_accumulation", 2),
    ("loss_mean_with_sample_weight", 3),
    ("layer_add_loss", 3),
    ("mixed_float16", 2),
}
