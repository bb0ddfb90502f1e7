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
# # 5b. Models that do not fit
#
# A model with 70 billion parameters in float32 has 280 GB of weights. No device
# can hold a copy. With `variables="sharded"`, each device keeps only a part of
# each large variable and of the optimizer's state for it. A layer gathers the
# whole variable when it computes, and its gradient goes back to the parts.
#
# On JAX, the devices of one process can do this, so this page needs JAX for it.
# (On PyTorch, several processes can.) The page trains a little GPT in this way,
# shows that the losses are those of one device, and plans a large one. On other
# backends, it shows the error and trains without sharding.

# %%
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import keras_dist

keras_dist.set_virtual_devices(4)

import keras
import matplotlib.pyplot as plt
import numpy as np

plt.style.use("petroff10")
devices = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
if keras.backend.backend() == "tensorflow":
    del devices[2:]  # a graph for each of them takes much memory
print("Backend:", keras.backend.backend())

# %% [markdown]
# ## A little GPT
#
# The model is made of Keras' layers. It has nothing in it about devices. We
# write it to a file, so that a command can import it later. `again=True` is for
# a later section.

# %%
CODE = '''
import keras
from keras import layers


class Tokens(layers.Layer):
    """A vector for each token, plus a vector for its place."""

    def __init__(self, vocabulary, length, width):
        super().__init__()
        self.tokens = layers.Embedding(vocabulary, width)
        self.places = layers.Embedding(length, width)

    def call(self, x):
        return self.tokens(x) + self.places(keras.ops.arange(x.shape[1]))


class Block(layers.Layer):
    """Attention to earlier tokens, then two dense layers."""

    def __init__(self, width, heads, again=False):
        super().__init__()
        self.attention = layers.MultiHeadAttention(
            heads, width // heads, use_bias=False
        )
        self.before_attention = layers.LayerNormalization()
        self.before_dense = layers.LayerNormalization()
        self.up = layers.Dense(4 * width, activation="gelu", name="up")
        self.down = layers.Dense(width, name="down")
        self.again = again

    def compute(self, x):
        y = self.before_attention(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.down(self.up(self.before_dense(x)))

    def call(self, x):
        if self.again:
            import jax

            return jax.checkpoint(self.compute)(x)
        return self.compute(x)


def make(
    again=False, vocabulary=26, length=15, width=64, heads=4, blocks=2
):
    inputs = keras.Input((length,), dtype="int32")
    x = Tokens(vocabulary, length, width)(inputs)
    for _ in range(blocks):
        x = Block(width, heads, again)(x)
    x = layers.LayerNormalization()(x)
    model = keras.Model(inputs, layers.Dense(vocabulary)(x))
    model.compile(
        keras.optimizers.Adam(0.003),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def make_again():
    return make(again=True)


def make_large():
    keras.config.set_dtype_policy("mixed_bfloat16")
    return make(True, 128_000, 2048, width=8192, heads=64, blocks=84)
'''
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "little_gpt.py").write_text(CODE)
sys.path.insert(0, str(folder))
import little_gpt

# %% [markdown]
# The text to learn is four random letters, four times. Nobody can know the
# first four letters. A model that has learned the rule knows all that follow.

# %%
rng = np.random.default_rng(0)
text = np.tile(rng.integers(0, 26, (512, 4)), 4)
x, y = text[:, :-1], text[:, 1:]
for row in text[:2]:
    print("".join(chr(ord("a") + letter) for letter in row))

# %% [markdown]
# ## Plan it
#
# Does a model with 7 billion parameters fit on 8 devices? In a terminal, write
# `keras-dist plan ...`. `--json` prints the numbers in place of tables.


# %%
def plan(*options, backend=None):
    found = [str(folder), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "keras_dist.cli", "plan", *options],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))},
    )
    return json.loads(done.stdout)


def large(number):
    options = ("--params", "7e9", "--dtype", "bfloat16")
    return plan(*options, "--devices", str(number), "--json")["plans"]


numbers_of_devices = [2, 4, 8, 16, 32]
plans = {number: large(number) for number in numbers_of_devices}
for name in ("mirrored", "variables sharded"):
    memory = plans[8][name]["memory"]["device 0"]
    print(
        f"{name}: {memory['kept'] / 1e9:.1f} GB between steps, "
        f"at most {memory['in_a_step'] / 1e9:.1f} GB in a step, without "
        "activations"
    )

# %% [markdown]
# Between steps, sharding keeps an eighth. In a step, arithmetic assumes the
# worst: that a device has gathered all variables and still holds all of them.
# For a model whose layers compute one after the other, the compiler can do
# better. More about this below.
#
# With more devices, a part becomes smaller. Mirroring does not get anything
# from more devices. A part of the optimizer's state is a smaller part of the
# whole.

# %%
fig, axes = plt.subplots(figsize=(7, 3.6))
for name, marker in (
    ("mirrored", "o"),
    ("optimizer sharded", "s"),
    ("variables sharded", "^"),
):
    gigabytes = [
        plans[number][name]["memory"]["device 0"]["kept"] / 1e9
        for number in numbers_of_devices
    ]
    axes.plot(numbers_of_devices, gigabytes, marker + "-", label=name)
axes.set_xscale("log", base=2)
axes.set_xticks(numbers_of_devices, map(str, numbers_of_devices))
axes.set_ylim(0, 46)
axes.set_xlabel("devices")
axes.set_ylabel("GB on each, between steps")
axes.set_title("7 billion parameters in bfloat16, Adam")
axes.legend(loc="center right")
axes.spines[["top", "right"]].set_visible(False)
fig.tight_layout()
plt.show()

# %% [markdown]
# ## Train it
#
# Only the strategy differs. TensorFlow raises an error when the strategy is
# made. So does PyTorch, which shards variables among processes only, with
# `MultiWorkerMirroredStrategy`. A script for all backends can catch the error.

# %%
strategies = {
    "plain Keras": None,
    "mirrored": keras_dist.MirroredStrategy(devices),
}
refusal = None
try:
    strategies["variables sharded"] = keras_dist.MirroredStrategy(
        devices, variables="sharded"
    )
except ValueError as error:
    refusal = str(error)

print(refusal or "This backend shards variables.")


# %%
def train(strategy):
    keras.utils.set_random_seed(0)  # the same initial weights in each run
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = little_gpt.make()
    history = model.fit(
        x, y, batch_size=64, epochs=5, shuffle=False, verbose=0
    ).history
    return model, history["loss"]


models, losses = {}, {}
for name, strategy in strategies.items():
    models[name], losses[name] = train(strategy)
    print(f"{name:17}", *(f"{loss:.5f}" for loss in losses[name]))

# %% [markdown]
# The losses agree, except for rounding. Saving works as always.
# `variable.numpy()`, `model.save` and `save_weights` gather one variable at a
# time, in the memory of the host. So a file from sharded training can be loaded
# anywhere, here by plain Keras:

# %%
name = list(models)[-1]
models[name].save_weights(folder / "little.weights.h5")
loaded = little_gpt.make()
loaded.optimizer.build(loaded.trainable_variables)
loaded.load_weights(folder / "little.weights.h5")

# %% [markdown]
# The file is written by one process. For a large model on many workers, that
# takes long. `save_sharded` writes a checkpoint in parts, each worker its own.
# Any number of devices can go on from it. (On JAX it needs the extra
# `sharded-checkpoints`. TensorFlow keeps variables whole, and refuses it.)

# %%
if keras.backend.backend() != "tensorflow":
    sharded = {} if refusal else {"variables": "sharded"}
    keras_dist.save_sharded(models[name], folder / "checkpoint")
    with keras_dist.MirroredStrategy(devices[:2], **sharded).scope():
        on_two = little_gpt.make()
    keras_dist.restore_sharded(on_two, folder / "checkpoint")
    for title, model in {"4 devices": models[name], "2": on_two}.items():
        found = model.evaluate(x, y, batch_size=64, verbose=0)
        print(f"{title:9} loss {found[0]:.5f}")

# %% [markdown]
# Does the model know the rule? It predicts each letter of texts that it has not
# seen:

# %%
new = np.tile(rng.integers(0, 26, (100, 4)), 4)
outputs = loaded(new[:, :-1])
guesses = keras.ops.convert_to_numpy(outputs).argmax(-1)
right = guesses == new[:, 1:]
for title, row in (("text", new[0, 1:]), ("guess", guesses[0])):
    print(f"{title:6}", "".join(chr(ord("a") + letter) for letter in row))
print(f"After the first four letters: {right[:, 3:].mean():.1%} are right.")

# %% [markdown]
# ## What each device keeps
#
# `summary` counts it. Each line is a device, as long as all variables together.

# %%
summaries = {
    name: keras_dist.summary(model, max_rows=0)
    for name, model in models.items()
}
kept = {
    name: found.devices[0].of_groups[0] + found.devices[0].of_groups[2]
    for name, found in summaries.items()
}
num_devices = [len(found.devices) for found in summaries.values()]
fig, column = plt.subplots(
    *(len(summaries), 1),
    figsize=(8, 1.5 + 0.4 * sum(num_devices)),
    height_ratios=num_devices,
    layout="constrained",
)
for axes, (name, found) in zip(column, summaries.items(), strict=True):
    found.plot(axes)
    axes.set_title(name)
    axes.set(xlabel="", xticks=[])
fig.legend(
    *axes.get_legend_handles_labels(), loc="outside lower center", ncols=2
)
plt.show()

# %% [markdown]
# Sharded, it is a little more than a quarter. Variables with fewer than 1,024
# elements are still copied: here, biases and the scales of normalization. To
# divide them would save little, and each would need a message.
#
# ## Compile the step
#
# JAX can compile the step for a machine that is not here, and tell what the
# compiler found. `cpu:8` works everywhere. Other targets need the compilers of
# the extra `targets`.


# %%
def compiled(function):
    (program,) = plan(
        *("--model", f"little_gpt:{function}", "--target", "cpu:8"),
        *("--variables", "sharded", "--batch-size", "64", "--json"),
    )["programs"]
    return {each["kind"]: each["num_bytes"] for each in program["collectives"]}


counted = {}
if refusal is None:
    for function in ("make", "make_again"):
        counted[function] = compiled(function)
        for kind, num_bytes in counted[function].items():
            print(f"{function:11} {kind:11} {num_bytes / 1000:6.1f} kB")
else:
    print("This needs JAX.")

# %% [markdown]
# ## When to compute a block again
#
# The backward pass needs the weights again. By default, a device may keep
# what it gathered in the forward pass until then. In the worst case, it holds
# the whole model at the end of the forward pass.
#
# `jax.checkpoint` around a block's call changes this. The device forgets what
# is in the block: the gathered weights, and the activations too. In the
# backward pass, it gathers and computes once more. `make_again` does so, and
# the step gathers the blocks' weights twice. `keras.RematScope` is Keras' name
# for the same.
#
# - The weights of one block, and a few of its activations, are small: leave it
#   out. The step gathers and computes less.
# - All gathered weights don't fit, or the activations don't: use it.
#
# We compiled a model of 6.7 billion parameters for `h100:8`, with 8 rows of
# 2,048 tokens in `mixed_bfloat16`. A device needs at most 62.4 GB without, and
# 15.2 GB with `jax.checkpoint`. The gathers grow from 13.7 to 26.6 GB. But it
# does not always help: with `cpu:8`, our little model needs at most 2.6 MB
# without, and 2.9 MB with it. So compile both ways, for your machine.
#
# ## A model with 70 billion parameters
#
# `make_large` in our file is such a model, in the same code. This command
# compiles its step for 8 hosts with 8 GPUs each:
#
# ```console
# keras-dist plan --model little_gpt:make_large --target h100:8x8 \
#     --variables sharded --batch-size 64
# ```
#
# It printed the following, on a machine with two cores and no GPU:
#
# ```text
# train_step: memory  64 x h100
# ─────────────────────────────
# Trainable              4.4 GB
# Non-trainable             0 B
# Optimizer              8.7 GB
# Metrics                  16 B
# Batch                 16.4 kB
# Results               24.4 kB
# Temporary values      27.7 GB
# At most               40.8 GB
# Device has            84.9 GB
#
# train_step: collectives  Devices  Count     Bytes  Each sends
# ─────────────────────────────────────────────────────────────
# all-gather                    64  1,096  277.0 GB    272.6 GB
# all-reduce                    64      2   33.6 MB     66.1 MB
# reduce-scatter                64     87  141.6 GB    139.4 GB
#
# It fits: 48.0% of the memory.
# ```
#
# All blocks are computed again. The model has 69.8 billion parameters. A device
# keeps 13.1 GB of weights and optimizer's state, and needs at most 40.8 GB in a
# step. The gathers bring 277 GB, which is nearly twice the 139.5 GB that the
# weights have in bfloat16. The numbers are the compiler's: nothing ran.
#
# ## Equal layers in a scan
#
# A large model is many equal layers. Its weights can be stacked, with an axis
# for the layers in front, and computed in a loop, `keras.ops.scan`. Then the
# compiler sees one layer, and is done in seconds. Under `variables="sharded"`,
# each turn of the loop gathers the weights of its layer only.


# %%
class Stack(keras.layers.Layer):
    def __init__(self, depth):
        super().__init__()
        self.depth = depth

    def build(self, shape):
        shape = (self.depth, shape[-1], shape[-1])
        self.kernel = self.add_weight(shape=shape, name="kernel")

    def call(self, x):
        def layer(x, kernel):
            return x + keras.ops.tanh(x @ kernel), None

        return keras.ops.scan(layer, x, self.kernel.value)[0]


points = rng.normal(size=(256, 64)).astype("float32")
for name, strategy in strategies.items():
    keras.utils.set_random_seed(0)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        stacked = keras.Sequential([keras.Input((64,)), Stack(12)])
        stacked.compile("adam", "mse")
    history = stacked.fit(
        points, -points, epochs=2, shuffle=False, verbose=0
    ).history
    print(f"{name:17}", *(f"{loss:.5f}" for loss in history["loss"]))

# %% [markdown]
# We compiled a model in the shape of Llama 3 with 71 billion parameters in this
# way. For `h100:8x8` it needs at most 25.9 GB on a device, and took 5 seconds.
# For 256 small TPUs, `v5e:16x16`, it needs 16.0 of 16.9 GB.
#
# ## Several devices for one replica
#
# A layer can also be too large for one device, or a batch too small to be
# divided over all of them. Then a replica gets several devices, its logical
# devices. `layout_map` says which axis of which variable they divide. Here the
# two devices of a replica each compute half of the hidden units of a block.
# `up` is divided along its outputs and `down` along its inputs, so that the
# devices only meet after `down`, to sum.

# %%
layout_map = {
    r".*up/kernel": (None, "logical"),
    r".*up/bias": ("logical",),
    r".*down/kernel": ("logical", None),
}
try:
    strategies["2 replicas of 2"] = keras_dist.MirroredStrategy(
        devices, logical_devices=2, layout_map=layout_map
    )
except ValueError as error:
    print(error)
else:
    model, in_twos = train(strategies["2 replicas of 2"])
    print("2 replicas of 2  ", *(f"{loss:.5f}" for loss in in_twos))
    for name in ("mirrored", "2 replicas of 2"):
        each = keras_dist.summary(models.get(name, model), max_rows=0).devices
        print(f"{name:17} {each[0].of_groups[0] / 1000:.0f} kB of weights each")

# %% [markdown]
# ## Limits
#
# - On JAX, `MultiWorkerMirroredStrategy` and `TPUStrategy` take `variables`,
#   too. On PyTorch, only `MultiWorkerMirroredStrategy` does, with one device in
#   each process. TensorFlow can't do it. Logical devices are for JAX; those of
#   a replica are in one process.
# - With `variables="sharded"`, a layer's variable is whole while the layer
#   computes. The largest variable has to fit on a device, with its activations.
#   Logical devices divide it, and the work inside of the layer.
# - Each step sends at least as many bytes as with mirrored variables. With
#   blocks that are computed again, it sends more. A slow network makes it slow.
# - Variables with fewer than 1,024 elements stay copies.
# - `cross_device_ops` can't be used with it.
#
# If only the optimizer's state is too large, [Memory](5_memory.ipynb) shows
# `optimizer_state="sharded"`.
#
# ## Facts
#
# The next cell checks what the page claims. Next page: [coming from
# tf.distribute](6a_coming_from_tf_distribute.ipynb).

# %%
# The losses are those of one device.
for found in losses.values():
    np.testing.assert_allclose(found, losses["plain Keras"], rtol=1e-3)

# The model learned the rule: nobody knows the first letters, it knows the rest.
assert right[:, 3:].mean() > 0.95 > 0.2 > right[:, :3].mean()

# A file of one is that of the other.
last = list(models)[-1]
for ours, theirs in zip(
    loaded.get_weights(), models[last].get_weights(), strict=True
):
    np.testing.assert_array_equal(ours, theirs)

# A checkpoint in parts is the same on fewer devices.
if keras.backend.backend() != "tensorflow":
    for ours, theirs in zip(
        on_two.get_weights(), models[last].get_weights(), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)

# Two devices that divide a replica compute what one does.
if "2 replicas of 2" in strategies:
    np.testing.assert_allclose(in_twos, losses["plain Keras"], rtol=1e-3)

# Mirrored, each device keeps all. By the plan, sharded is an eighth of it.
assert kept["mirrored"] == kept["plain Keras"]
kept_of = {
    name: of["memory"]["device 0"]["kept"] for name, of in plans[8].items()
}
assert abs(kept_of["variables sharded"] * 8 - kept_of["mirrored"]) < 100

assert (refusal is None) == (keras.backend.backend() == "jax")
if refusal is None:
    # All that is large is divided: variables of 1,024 elements and more.
    sizes = [int(np.prod(w.shape)) for w in models["plain Keras"].weights]
    small = sum(size for size in sizes if size < 1024)
    share = small + (sum(sizes) - small) / 4
    assert abs(kept["variables sharded"] - 3 * 4 * share) < 0.01 * 12 * share
    # Each large variable is gathered once; the blocks' again where they are
    # computed again. Gradients are summed once in both.
    gathered = 4 * (sum(sizes) - small)
    once, twice = (
        counted[name]["all-gather"] for name in ("make", "make_again")
    )
    assert abs(once - gathered) < 0.05 * gathered
    assert 1.8 * gathered < twice < 2 * gathered
    assert counted["make"]["all-reduce"] == counted["make_again"]["all-reduce"]
else:
    assert "jax" in refusal or "keras-dist run" in refusal
