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
# # 1. Quickstart
#
# You have a Keras model that trains with `fit`. With two more lines, it trains
# on all devices of your machine at once. It ends with the weights that training
# on one device would have given.
#
# You need five words:
#
# - **device**: hardware that computes, such as a GPU. Here it is a part of the
#   CPU.
# - **replica**: the model's computation on one device.
# - **strategy**: says which devices there are, and which of them keeps what.
# - **global batch**: the rows of one training step, for all replicas together.
# - **share**: the rows of the global batch that one replica computes.

# %% [markdown]
# ## Devices
#
# A laptop has one CPU. `set_virtual_devices` makes it look like several
# devices, so that you can try everything without GPUs. Call it before anything
# else. With GPUs, leave it out.

# %%
import pathlib
import tempfile

import keras_dist

keras_dist.set_virtual_devices(4)

import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

plt.style.use("petroff10")
print("Backend:", keras.backend.backend())
print("Devices:", keras_dist.list_devices())

# %% [markdown]
# The code does not name the backend. `KERAS_BACKEND` chooses it: `jax`,
# `tensorflow` or `torch`.
#
# ## Data and a model
#
# The data are small pictures of digits from scikit-learn. We take 1507 rows,
# because this number is awkward: in batches of 100, the last batch has 7 rows
# for 4 devices.

# %%
digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
x = (digits.data[order] / 16.0).astype("float32")
y = digits.target[order].astype("int32")
x_train, y_train = x[:1507], y[:1507]
x_test, y_test = x[1507:], y[1507:]
print("Train:", x_train.shape, " Test:", x_test.shape)

# %% [markdown]
# The model is plain Keras. It contains a batch normalization, whose result
# depends on all rows of a batch.


# %%
def build_model():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, use_bias=False, name="hidden"),
            keras.layers.BatchNormalization(momentum=0.9, name="norm"),
            keras.layers.Activation("silu"),
            keras.layers.Dense(10, name="logits"),
        ],
        name="digits",
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.005),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


# %% [markdown]
# ## The two lines
#
# Make a strategy, and build the model in its scope:

# %%
keras.utils.set_random_seed(0)  # the same initial weights in each run
strategy = keras_dist.MirroredStrategy()

with strategy.scope():
    model = build_model()

initial_weights = model.get_weights()  # to compare with, later
print(strategy)
print("Replicas:", strategy.num_replicas_in_sync)

# %% [markdown]
# ## What the scope did
#
# Variables that are made in the scope belong to the strategy. This one is
# *mirrored*: each device has a copy, and training keeps the copies equal.

# %%
kernel = model.get_layer("hidden").kernel
print("Copies on:", strategy.devices_of(kernel))
print("Kind:", type(kernel).__name__, " Shape:", tuple(kernel.shape))

# %% [markdown]
# The model remembers its strategy. So `fit`, `evaluate`, `predict` and `save`
# also work outside of the scope.
#
# ## The global batch
#
# `batch_size` always means the rows of all replicas together, whatever their
# number. `explain` shows which replica computes which rows of the next batch.
# It does not compute anything.

# %%
first = strategy.explain(x_train, y_train, batch_size=100)
print(first)

# %% [markdown]
# The last batch has 7 rows. The replicas share them as evenly as possible.

# %%
last = strategy.explain(x_train[1500:], y_train[1500:])
print(last)

# %% [markdown]
# `plot` draws the same. Each replica has a line, as long as the batch.

# %%
first.plot()

# %%
last.plot()

# %% [markdown]
# ## Train
#
# This is the `fit` that you know. Losses and metrics are those of the global
# batch.

# %%
settings = {"batch_size": 100, "epochs": 4, "shuffle": False, "verbose": 0}
history = model.fit(x_train, y_train, **settings).history
for epoch, loss in enumerate(history["loss"]):
    print(
        f"epoch {epoch + 1}: loss {loss:.4f}, "
        f"accuracy {history['accuracy'][epoch]:.4f}"
    )

# %% [markdown]
# `summary` shows which device stores which variables, and what a step has to
# send. Here the optimizer keeps two numbers for each weight, so each device
# holds three times the trainable weights. A step sends gradients: their
# *all-reduce* adds them up over the replicas.

# %%
summary = keras_dist.summary(model)
print(summary)

# %% [markdown]
# This is the same as a picture. Each line is a device, as long as all variables
# together. Each device keeps all of them.

# %%
summary.plot()

# %% [markdown]
# ## Is it really the same?
#
# Train the same model without a strategy, from the same initial weights and on
# the same batches. That is plain Keras on one device.

# %%
plain = build_model()
plain.set_weights(initial_weights)
plain_history = plain.fit(x_train, y_train, **settings).history

difference = max(
    np.abs(ours - theirs).max()
    for ours, theirs in zip(
        model.get_weights(), plain.get_weights(), strict=True
    )
)
print(f"Largest difference in any weight: {difference:.1e}")

# %%
fig, axes = plt.subplots(figsize=(6, 3.2))
epochs = range(1, settings["epochs"] + 1)
axes.plot(
    epochs,
    plain_history["loss"],
    linewidth=7,
    alpha=0.4,
    label="plain Keras, one device",
)
axes.plot(
    epochs, history["loss"], "o--", color="black", label="4 replicas (on top)"
)
axes.set_xlabel("epoch")
axes.set_ylabel("training loss")
axes.set_xticks(list(epochs))
axes.set_title("The same training")
axes.legend()
fig.tight_layout()
plt.show()

# %% [markdown]
# ## Evaluate and save
#
# A saved file does not depend on the strategy. Plain Keras loads it, and so
# does a model on another number of devices. The same is true for
# `model.save("m.keras")`.

# %%
scores = model.evaluate(
    x_test, y_test, batch_size=100, verbose=0, return_dict=True
)
print("Test accuracy:", round(scores["accuracy"], 4))

with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "digits.weights.h5"
    model.save_weights(path)
    plain.load_weights(path)

same_file = all(
    np.array_equal(ours, theirs)
    for ours, theirs in zip(
        model.get_weights(), plain.get_weights(), strict=True
    )
)
print("Plain Keras loaded the same weights:", same_file)

# %% [markdown]
# ## Facts
#
# The next cell checks what the page claims. Next page: [one loop, three
# backends](2_one_loop.ipynb), for your own training loops.

# %%
# Each row of each batch is computed once, by one replica.
for explanation, rows in ((first, 100), (last, 7)):
    taken = [row for part in explanation for row in part.rows]
    assert taken == list(range(rows))
assert [part.num_rows for part in first] == [25, 25, 25, 25]
assert sorted(part.num_rows for part in last) == [1, 2, 2, 2]

# Each device has all variables: weights, and Adam's two numbers for each.
devices = tuple(keras_dist.list_devices("cpu"))
assert len(devices) == 4
assert all(strategy.devices_of(each) == devices for each in model.weights)
trained = 4 * sum(int(np.prod(v.shape)) for v in model.trainable_weights)
for device in summary.devices:
    in_weights, _, in_optimizer, _ = device.of_groups
    assert in_weights == trained
    assert 2 * trained <= in_optimizer <= 2 * trained + 100

# An all-reduce among N devices sends 2 (N - 1) / N of the gradients from each.
assert summary.bytes_sent == 4 * 2 * 3 / 4 * trained

# The weights, losses and accuracies are those of one device. Adam divides by
# the size of a gradient, so rounding errors of tiny gradients become large.
assert difference < 1e-4
assert np.allclose(history["loss"], plain_history["loss"], rtol=1e-4)
assert np.allclose(history["accuracy"], plain_history["accuracy"], atol=1e-3)
assert scores["accuracy"] > 0.85
assert same_file
