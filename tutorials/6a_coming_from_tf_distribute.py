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
# | `tf.nn.scale_regularization_loss` | `keras_dist.scale_regularization_loss` |
# | `tf.config.set_logical_device_...` | `keras_dist.set_virtual_devices` |
# | `tf.tpu.experimental` | `keras_dist.tpu.experimental` |
# | `tf.config.experimental_connect_to_cluster` | leave it out |
# | `tf.train.Checkpoint` | `model.save_weights` of a compiled model |
# | `dataset.shuffle(n)` | the same with a seed, or NumPy |
# | variables that the first step makes | build the model first |
# | a loss that overrides `__call__` | the same in `fit`; `call` in a loop |
# | sums in `add_loss` | `sum_over_rows` in `fit`; as they are in a loop |
#
# The section "What needs more than a name" explains the last five lines.
#
# If TensorFlow is the backend, this page also runs the code of `tf.distribute`,
# and compares the numbers. On JAX and PyTorch, you can only read that code.

# %%
import contextlib
import difflib
import inspect
import pathlib
import tempfile

import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import keras_dist

keras_dist.set_virtual_devices(4)  # before any device is used
plt.style.use("petroff10")

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
# ## A whole program, ported
#
# This program has what a training loop of one's own usually has: shuffled data,
# a small convolutional network with a regularizer, a step for training and one
# for testing, metrics, and a checkpoint after each epoch. It can go on from a
# checkpoint. First, this is the program with `tf.distribute`:

# %%
EPOCHS = 2
images = digits.images[..., None].astype("float32") / 16
x_train, y_train = images[:1408], digits.target[:1408]
x_test, y_test = images[1408:1792], digits.target[1408:1792]


def make_network():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10, kernel_regularizer="l2"),
        ]
    )


# %%
def before(devices, folder, first_epoch=0):
    strategy = tf.distribute.MirroredStrategy(
        devices, tf.distribute.ReductionToOneDevice()
    )
    data = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    data = data.shuffle(len(x_train), seed=0).batch(BATCH_SIZE)
    train_data = strategy.experimental_distribute_dataset(data)
    data = tf.data.Dataset.from_tensor_slices((x_test, y_test))
    data = data.batch(BATCH_SIZE)
    test_data = strategy.experimental_distribute_dataset(data)

    with strategy.scope():
        model = make_network()
        optimizer = keras.optimizers.Adam(0.03)
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        test_loss = keras.metrics.Mean()
        test_accuracy = keras.metrics.SparseCategoricalAccuracy()
        loss_fn = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    if first_epoch:
        checkpoint.read(f"{folder}/{first_epoch - 1}").assert_consumed()

    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.nn.compute_average_loss(
                loss_fn(y, logits), global_batch_size=BATCH_SIZE
            )
            loss += tf.nn.scale_regularization_loss(model.losses)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply(gradients, variables)
        accuracy.update_state(y, logits)
        return loss

    def test_step(x, y):
        logits = model(x, training=False)
        test_loss.update_state(loss_fn(y, logits))
        test_accuracy.update_state(y, logits)

    @tf.function
    def distributed_train_step(x, y):
        per_replica = strategy.run(train_step, args=(x, y))
        return strategy.reduce("SUM", per_replica, axis=None)

    @tf.function
    def distributed_test_step(x, y):
        strategy.run(test_step, args=(x, y))

    metrics = (accuracy, test_loss, test_accuracy)
    history = []
    for epoch in range(first_epoch, EPOCHS):
        for metric in metrics:
            metric.reset_state()
        for batch in train_data:
            loss = distributed_train_step(*batch)
        for batch in test_data:
            distributed_test_step(*batch)
        history.append([float(loss), *(float(m.result()) for m in metrics)])
        checkpoint.write(f"{folder}/{epoch}")
    return history


# %% [markdown]
# Next, this is the same program with keras_dist. `tf.data` works on each
# backend if TensorFlow is installed, so its lines could stay. Here we replace
# them, so that the program needs no TensorFlow. The seed of the order is the
# number of the epoch. So all workers have the same order, and a program that
# goes on from a checkpoint has the order that it would have had.


# %%
def after(devices, folder, first_epoch=0):
    strategy = keras_dist.MirroredStrategy(devices)

    def train_data(epoch):
        order = np.random.default_rng(epoch).permutation(len(x_train))
        starts = range(BATCH_SIZE, len(order), BATCH_SIZE)
        parts = np.split(order, starts)
        batches = [(x_train[rows], y_train[rows]) for rows in parts]
        return strategy.experimental_distribute_dataset(batches)

    starts = range(0, len(x_test), BATCH_SIZE)
    slices = [slice(start, start + BATCH_SIZE) for start in starts]
    data = [(x_test[rows], y_test[rows]) for rows in slices]
    test_data = strategy.experimental_distribute_dataset(data)

    with strategy.scope():
        model = make_network()
        optimizer = keras.optimizers.Adam(0.03)
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        test_loss = keras.metrics.Mean()
        test_accuracy = keras.metrics.SparseCategoricalAccuracy()
        loss_fn = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )
    model.compile(optimizer)  # so that files have its state, too
    if first_epoch:
        model.load_weights(f"{folder}/{first_epoch - 1}.weights.h5")

    @keras_dist.function
    def train_step(x, y):
        def compute_loss():
            logits = model(x, training=True)
            loss = keras_dist.compute_average_loss(
                loss_fn(y, logits), global_batch_size=BATCH_SIZE
            )
            accuracy.update_state(y, logits)
            return loss + keras_dist.scale_regularization_loss(model.losses)

        variables = model.trainable_variables
        loss, gradients = keras_dist.value_and_grad(compute_loss, variables)
        optimizer.apply(gradients, variables)
        return loss

    @keras_dist.function
    def test_step(x, y):
        logits = model(x, training=False)
        test_loss.update_state(loss_fn(y, logits))
        test_accuracy.update_state(y, logits)

    def distributed_train_step(x, y):
        per_replica = strategy.run(train_step, args=(x, y))
        return strategy.reduce("SUM", per_replica, axis=None)

    def distributed_test_step(x, y):
        strategy.run(test_step, args=(x, y))

    metrics = (accuracy, test_loss, test_accuracy)
    history = []
    for epoch in range(first_epoch, EPOCHS):
        for metric in metrics:
            metric.reset_state()
        for batch in train_data(epoch):
            loss = distributed_train_step(*batch)
        for batch in test_data:
            distributed_test_step(*batch)
        history.append([float(loss), *(float(m.result()) for m in metrics)])
        model.save_weights(f"{folder}/{epoch}.weights.h5")
    return history


# %% [markdown]
# Side by side, these are the lines that change. Lines between them are the same
# in both programs, and `...` stands for them.


# %%
def lines_of(program):
    """Returns the lines of a program that are not empty."""
    body = inspect.getsource(program).splitlines()[1:]
    return [line[4:] for line in body if line.strip()]


programs = lines_of(before), lines_of(after)
matcher = difflib.SequenceMatcher(None, *programs, autojunk=False)
removed = added = 0
for tag, i, i_end, j, j_end in matcher.get_opcodes():
    if tag == "equal":
        print("...")
        continue
    removed, added = removed + i_end - i, added + j_end - j
    for row in range(max(i_end - i, j_end - j)):
        left = programs[0][i:i_end][row : row + 1] or [""]
        right = programs[1][j:j_end][row : row + 1] or [""]
        print(f"{left[0]:76} | {right[0]}".rstrip())
print(f"Of {len(programs[0])} lines, {removed} are removed, {added} added.")

# %% [markdown]
# The program does not name the number of devices, so we can run it on one and
# on four. A second run goes on from the checkpoint of the first epoch.

# %%
folder = tempfile.mkdtemp()
ported = {
    "keras_dist": after(DEVICES, folder),
    "one device": after(DEVICES[:1], tempfile.mkdtemp()),
    "resumed": after(DEVICES, folder, first_epoch=1),
}
if HAS_NATIVE:
    ported["tf.distribute"] = before(DEVICES, tempfile.mkdtemp())
print("The last loss, accuracy, test loss and test accuracy of each epoch:")
for name, history in ported.items():
    for epoch, numbers in enumerate(history, EPOCHS - len(history)):
        print(f"{name:14} epoch {epoch} {np.round(numbers, 4)}")
print(sorted(path.name for path in pathlib.Path(folder).iterdir()))

# %% [markdown]
# `tf.distribute` has other numbers here because `tf.data` shuffles the rows
# into another order. The first loop on this page has the same order, and the
# same numbers.
#
# ## What needs more than a name
#
# **Checkpoints.** Choose by what trains the model, and where:
#
# | | holds | works on |
# |---|---|---|
# | `model.save`, `keras.models.load_model` | model, weights, optimizer | all |
# | `model.save_weights`, `load_weights` | weights, optimizer | all |
# | `keras_dist.save_sharded`, `restore_sharded` | the same | JAX, PyTorch |
# | `keras.callbacks.BackupAndRestore` | what `fit` needs to go on | all |
# | `tf.train.Checkpoint` | what you name | TensorFlow |
#
# In a loop of your own, call `model.compile(optimizer)`. Otherwise, files have
# only weights. Before `load_weights`, build the optimizer, as the program above
# does. Otherwise, Keras leaves its state out, with a warning. Call `load_model`
# in the scope. On several workers, call these methods of models, and
# `save_sharded` and `restore_sharded`, on every worker. Of `save` and
# `save_weights`, the chief alone writes, and each worker reads the file.
#
# **Order of the data.** Every worker has the same global batches, and takes its
# own rows of each. So the order has to be the same on all workers. If not, some
# rows are left out, and some come twice. In one process, any order works.
#
# | you shuffle with | the order is the same on all workers |
# |---|---|
# | `dataset.shuffle(n)` | on TensorFlow, not on JAX and PyTorch |
# | `dataset.shuffle(n, seed=0)` | yes |
# | `np.random.permutation(n)` | yes: all have the chief's random state |
# | `np.random.default_rng(0)` | yes |
# | `np.random.default_rng()` | no |
#
# **Build the model first.** `model.trainable_variables` is an argument of
# `value_and_grad`, so the model has to have its variables before the loss is
# computed. A tape asks for them later. Begin the model with `keras.Input`, or
# call `model.build` in the scope. Optimizers and metrics may make their
# variables in the first call of a compiled step.
#
# **Losses of your own.** In `fit`, a loss may override `call` or `__call__`,
# and return one number for all rows: it gets the rows of all replicas. In a
# loop, it gets the rows of one replica, as under `tf.distribute`. There, let it
# return a value for each row: override `call`, and make the loss with
# `reduction="none"`. Then `compute_average_loss` gives the mean over all rows.
#
# **Sums in `add_loss`.** In `fit`, a number that a layer passes to `add_loss`
# is a mean over rows. A layer may also pass one value for each row, or the sum
# `keras_dist.sum_over_rows(x)` over the rows of all replicas. In a loop, add
# sums over a replica's rows, with `sum(model.losses)`. Regularizers of weights
# are equal on all replicas, so `scale_regularization_loss` divides them by the
# number of replicas. The next cell has such a loss and such a sum:


# %%
class SquaredError(keras.losses.Loss):
    def call(self, y_true, y_pred):
        y_true = keras.ops.one_hot(y_true, 10)
        return keras.ops.sum(keras.ops.square(y_pred - y_true), axis=1)


class Activity(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.001 * keras.ops.sum(keras.ops.square(x)))
        return x


def train_with_sums(devices):
    strategy = keras_dist.MirroredStrategy(devices)
    with strategy.scope():
        model = make_model()
        model.add(Activity())
        optimizer = keras.optimizers.SGD(0.05)
        loss_fn = SquaredError(reduction="none")

    @keras_dist.function
    def step(x, y):
        def compute_loss():
            losses = loss_fn(y, model(x, training=True))
            loss = keras_dist.compute_average_loss(losses)
            return loss + sum(model.losses)

        variables = model.trainable_variables
        loss, gradients = keras_dist.value_and_grad(compute_loss, variables)
        optimizer.apply(gradients, variables)

    starts = range(0, 130, BATCH_SIZE)  # the last batch has 2 rows
    batches = [(x[:130][i : i + 64], y[:130][i : i + 64]) for i in starts]
    for batch in strategy.experimental_distribute_dataset(batches):
        strategy.run(step, args=batch)
    return np.concatenate([w.ravel() for w in model.get_weights()])


sums = train_with_sums(DEVICES), train_with_sums(DEVICES[:1])
print(f"The largest difference: {np.abs(sums[0] - sums[1]).max():.1e}")

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
# | Dropout in `fit` | the same mask on each replica | as on one device |
# | metrics that are a maximum | states are added up | get all rows: exact |
# | `fit` on several workers | fails in Keras 3 | works |
# | `aggregation=NONE` in `run` | replicas drift apart | an error, or the mean |
# | replicas that disagree | some error, or a hang | an error says where |
# | `ReduceOp` | SUM, MEAN | also MIN, MAX, PROD |
# | compiled | `tf.function` around `run` | `keras_dist.function` on the step |
# | `next(iterator)` in `tf.function` | works | does not work; `for` does |
# | TPU | yes | with JAX |
# | parameter servers | yes | not yet |
#
# [The guide](../docs/pages/guide/global_batch.md) describes all
# differences. On TensorFlow, `Strategy.from_native` makes a keras_dist strategy
# with the devices of a `tf.distribute` strategy that you already have:

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

# The ported program has the numbers of one device. From a checkpoint, it goes
# on as if it had not stopped.
np.testing.assert_allclose(
    ported["keras_dist"], ported["one device"], rtol=1e-3
)
np.testing.assert_allclose(
    ported["resumed"], ported["keras_dist"][1:], rtol=1e-3
)
assert ported["keras_dist"][-1][-1] > 0.8
assert removed <= 20 and added <= 25

# So do a loss of one's own and sums in `add_loss`.
np.testing.assert_allclose(*sums, atol=1e-5)

if HAS_NATIVE:
    np.testing.assert_allclose(
        loop["tf.distribute"], loop["keras_dist"], rtol=1e-4
    )
    # Another order of the rows gives another network, as good as this one.
    accuracy = ported["tf.distribute"][-1][-1]
    assert abs(accuracy - ported["keras_dist"][-1][-1]) < 0.1
    even, partial, clipped = differences["tf.distribute"]
    assert even < 1e-5
    assert partial > 1e-3 and clipped > 1e-3
