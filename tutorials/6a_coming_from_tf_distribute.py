# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6a. Coming from tf.distribute
#
# keras_dist has the names, arguments and results of `tf.distribute`, on JAX,
# TensorFlow and PyTorch. In most programs, you change these lines:
#
# | `tf.distribute` | keras_dist |
# |---|---|
# | `tf.distribute.MirroredStrategy()` | `keras_dist.MirroredStrategy()` |
# | `tf.distribute.MultiWorkerMirroredStrategy()`, ... | the same names |
# | `strategy.scope()`, `run`, `reduce`, `gather` | the same |
# | `tf.distribute.get_replica_context()` | `keras_dist.get_replica_context()` |
# | `@tf.function` | `@keras_dist.function`, on the replica's step |
# | `tf.GradientTape` | `keras_dist.value_and_grad` |
# | `tf.nn.compute_average_loss` | `keras_dist.compute_average_loss` |
# | `tf.config.set_logical_device_...` | `keras_dist.set_virtual_devices` |
# | `tf.tpu.experimental` | `keras_dist.tpu.experimental` |
# | `tf.config.experimental_connect_to_cluster` | leave it out |
#
# If TensorFlow is the backend, this page also runs the code of `tf.distribute`,
# and compares the numbers. On JAX and PyTorch, you can only read that code.

# %%
import contextlib

import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import keras_dist

keras_dist.set_virtual_devices(4)  # before any device is used

HAS_NATIVE = keras.backend.backend() == "tensorflow"
if HAS_NATIVE:
    import tensorflow as tf

DEVICES = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
BATCH_SIZE = 64
digits = load_digits()
x, y = digits.data[:192].astype("float32") / 16, digits.target[:192]


def make_model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )


# %% [markdown]
# ## A training loop of your own
#
# First, this is the loop with `tf.distribute`, as in TensorFlow's guides:


# %%
def train_with_tf_distribute():
    strategy = tf.distribute.MirroredStrategy(
        DEVICES, tf.distribute.ReductionToOneDevice()
    )
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            per_example = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            loss = tf.nn.compute_average_loss(
                per_example, global_batch_size=BATCH_SIZE
            )
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def distributed_step(x, y):
        per_replica = strategy.run(step, args=(x, y))
        return strategy.reduce("SUM", per_replica, axis=None)

    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    batches = strategy.experimental_distribute_dataset(batches)
    return [float(distributed_step(*batch)) for batch in batches]


# %% [markdown]
# Next, this is the loop with keras_dist. It compiles the step that each replica
# runs. Gradients come from a function without arguments instead of a tape. Data
# may be arrays, `tf.data`, a `PyDataset`, a `DataLoader` or any iterable of
# batches.


# %%
def train_with_keras_dist():
    strategy = keras_dist.MirroredStrategy(DEVICES)
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.SGD(0.5)

    @keras_dist.function
    def step(x, y):
        def loss_fn():
            per_example = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            return keras_dist.compute_average_loss(per_example)

        variables = model.trainable_variables
        loss, gradients = keras_dist.value_and_grad(loss_fn, variables)
        optimizer.apply(gradients, variables)
        return loss

    def distributed_step(x, y):
        per_replica = strategy.run(step, args=(x, y))
        return strategy.reduce("SUM", per_replica, axis=None)

    starts = range(0, len(x), BATCH_SIZE)
    batches = [(x[i : i + BATCH_SIZE], y[i : i + BATCH_SIZE]) for i in starts]
    batches = strategy.experimental_distribute_dataset(batches)
    return [float(distributed_step(*batch)) for batch in batches]


# %%
loop = {"keras_dist": train_with_keras_dist()}
if HAS_NATIVE:
    loop["tf.distribute"] = train_with_tf_distribute()

one_device = make_model()
one_device.compile(
    keras.optimizers.SGD(0.5),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
loop["one device"] = []
for i in range(0, len(x), 64):
    one_device.reset_metrics()  # Keras 3.14 would give the mean over calls
    loss = one_device.train_on_batch(x[i : i + 64], y[i : i + 64])
    loop["one device"].append(float(loss))
for name, losses in loop.items():
    print(f"{name:14} {np.round(losses, 5)}")

# %% [markdown]
# ## `fit`
#
# You call `fit` in the same way under both. The difference is in the numbers.
# Under `tf.distribute`, Keras' `fit` averages the replicas' losses with equal
# weights, and clips gradients before they are added up. So if shares differ or
# gradients are clipped, the training differs from that on one device.
# keras_dist gives the numbers of one device: that is its purpose.
#
# We train three cases: batches of 64 rows, a last batch of 2 rows, and clipped
# gradients. For each, we look at the largest difference of a weight from plain
# Keras.


# %%
def train(make_scope, rows, optimizer):
    with make_scope():
        model = make_model()
        model.compile(
            keras.optimizers.SGD.from_config(optimizer),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,  # tf.distribute fails with it
        )
    model.fit(
        x[:rows], y[:rows], batch_size=BATCH_SIZE, shuffle=False, verbose=0
    )
    return np.concatenate([w.ravel() for w in model.get_weights()])


scopes = {"keras_dist": keras_dist.MirroredStrategy(DEVICES).scope}
if HAS_NATIVE:
    native = tf.distribute.MirroredStrategy(
        DEVICES, tf.distribute.ReductionToOneDevice()
    )
    scopes["tf.distribute"] = native.scope
cases = {
    "batches of 64": (192, {"learning_rate": 0.5}),
    "last batch of 2": (130, {"learning_rate": 0.5}),
    "clipnorm=0.1": (192, {"learning_rate": 0.5, "clipnorm": 0.1}),
}
differences = {name: [] for name in scopes}
for case in cases.values():
    expected = train(contextlib.nullcontext, *case)
    for name, scope in scopes.items():
        found = train(scope, *case)
        differences[name].append(float(np.abs(found - expected).max()))
differences

# %%
figure, axes = plt.subplots(figsize=(7.5, 3), layout="constrained")
positions = np.arange(len(cases))
for offset, (name, values) in enumerate(differences.items()):
    # A logarithmic axis has no zero, so a difference of 0 is drawn as 1e-9.
    shown = np.maximum(values, 1e-9)
    bars = axes.barh(
        positions + 0.35 * offset, shown, 0.32, left=1e-9, label=name
    )
    axes.bar_label(bars, [f"{value:.0e}" for value in values], padding=4)
axes.axvspan(1e-9, 1e-5, color="0.93", zorder=0)
axes.text(9e-6, -0.5, "float rounding", color="0.4", ha="right", va="center")
axes.set(
    xscale="log",
    xlim=(1e-9, 10),
    ylim=(len(cases) - 0.2, -0.75),
    xlabel="largest difference of a weight from one device",
)
axes.set_yticks(positions + 0.17 * (len(differences) - 1), list(cases))
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False, loc="upper right")
plt.show()

# %% [markdown]
# ## What differs
#
# | | `tf.distribute` | keras_dist |
# |---|---|---|
# | backend | TensorFlow | JAX, TensorFlow, PyTorch |
# | a last partial batch | equal weight of replicas | equal weight of rows |
# | a first batch that is odd, or very small | `fit` fails | works |
# | `compute_average_loss` divides by | own rows x replicas | all rows |
# | clipping in `fit` | before the sum | after the sum, as on one device |
# | BatchNormalization in `fit` | uses a replica's rows | uses all rows |
# | Dropout | the same mask on each replica | a different mask on each |
# | metrics that are a maximum | states are added up | exact, or refused |
# | `fit` on several workers | fails in Keras 3 | works |
# | `aggregation=NONE` in `run` | replicas drift apart | an error, or the mean |
# | replicas that disagree | some error, or a hang | an error says where |
# | `ReduceOp` | SUM, MEAN | also MIN, MAX, PROD |
# | compiled | `tf.function` around `run` | `keras_dist.function` on the step |
# | `next(iterator)` in `tf.function` | works | does not work; `for` does |
# | TPU | yes | with JAX |
# | parameter servers | yes | not yet |
#
# The section "Behavior in detail" of the README lists all differences. On
# TensorFlow, `Strategy.from_native` makes a keras_dist strategy with the
# devices of a `tf.distribute` strategy that you already have:

# %%
if HAS_NATIVE:
    print(keras_dist.Strategy.from_native(native))

# %% [markdown]
# ## Facts
#
# The next cell checks what the page claims.

# %%
# The loop gives the losses of one device, on each backend.
np.testing.assert_allclose(loop["keras_dist"], loop["one device"], rtol=1e-4)

# `fit` gives the weights of one device, in every case.
assert all(value < 1e-5 for value in differences["keras_dist"])

if HAS_NATIVE:
    np.testing.assert_allclose(
        loop["tf.distribute"], loop["keras_dist"], rtol=1e-4
    )
    even, partial, clipped = differences["tf.distribute"]
    assert even < 1e-5
    assert partial > 1e-3 and clipped > 1e-3
