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
# # 5. Memory
#
# With a copy of everything on each device, a model has to fit into the memory
# of one device. Often, most of this memory is not for the weights but for the
# optimizer's state: Adam keeps two numbers for each weight. This page shows two
# ways to keep less on each device, what they cost, and how to compute the
# memory before you start. The [next
# page](5b_models_that_do_not_fit.ipynb) shows a third one, on JAX: parts of the
# weights, too.
#
# | strategy | weights | optimizer's state |
# |---|---|---|
# | mirrored | a copy on each device | a copy on each device |
# | `optimizer_state="sharded"` | a copy on each device | a part on each |
# | central storage | one copy, on the host | one copy, on the host |
# | `variables="sharded"` (next page) | a part on each | a part on each |

# %%
import contextlib
import json
import subprocess
import sys

import keras_dist

# Four devices that compute, and one in place of the host's memory.
keras_dist.set_virtual_devices(5)

import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

plt.style.use("petroff10")
compute = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
print("Backend:", keras.backend.backend())

# %% [markdown]
# ## The strategies

# %%
strategies = {
    "plain Keras": None,
    "mirrored": keras_dist.MirroredStrategy(compute),
    "central": keras_dist.CentralStorageStrategy(compute, "cpu:4"),
}

# %% [markdown]
# TensorFlow can't shard an optimizer's state, and raises an error that says so.
# PyTorch keeps one part in each process. Its error says how to start one for
# each device: `keras-dist run --workers 4 train.py`, with a
# `MultiWorkerMirroredStrategy(optimizer_state="sharded")` in the script. A
# script for all backends can catch these errors.

# %%
refusal = None
try:
    strategies["sharded"] = keras_dist.MirroredStrategy(
        compute, optimizer_state="sharded"
    )
except ValueError as error:
    refusal = str(error)

print(refusal or "This backend shards the optimizer's state in one process.")

# %% [markdown]
# ## The same training under each
#
# Only the strategy differs.

# %%
digits = load_digits()
x = (digits.data[:400] / 16.0).astype("float32")
y = digits.target[:400].astype("int32")


def train(strategy, initial_weights=None):
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(256, activation="tanh"),
                keras.layers.Dense(256, activation="tanh"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer="adam",
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    if initial_weights is not None:
        model.set_weights(initial_weights)
    start = model.get_weights()
    model.fit(x, y, batch_size=100, epochs=2, shuffle=False, verbose=0)
    return model, start


keras.utils.set_random_seed(0)  # the same initial weights in each run
models = {}
models["plain Keras"], start = train(None)
for name, strategy in strategies.items():
    if name not in models:
        models[name], _ = train(strategy, start)
    print(f"{name} is trained")

# %% [markdown]
# ## What each device keeps
#
# `summary` counts what each device keeps between steps, and what a step sends.
# This is the summary for central storage:

# %%
summaries = {
    name: keras_dist.summary(model, max_rows=0)
    for name, model in models.items()
}
print(summaries["central"])

# %% [markdown]
# The picture compares all strategies. Each line is a device, as long as all
# variables together. What the device keeps is coloured. With central storage,
# the devices that compute keep the least, and a step sends the most. Sharding
# the optimizer's state saves memory. By this estimate, it sends no more than
# mirroring does. That is true on GPUs, TPUs, and for PyTorch's workers. JAX on
# CPU devices sends 1.5 times as much.

# %%
num_devices = [len(found.devices) for found in summaries.values()]
fig, column = plt.subplots(
    *(len(summaries), 1),
    figsize=(8, 2 + 0.4 * sum(num_devices)),
    height_ratios=num_devices,
    layout="constrained",
)
for axes, (name, found) in zip(column, summaries.items(), strict=True):
    found.plot(axes)
    axes.set_title(f"{name}: a step sends {found.bytes_sent / 1e3:,.0f} kB")
    axes.set(xlabel="", xticks=[])
fig.legend(
    *axes.get_legend_handles_labels(), loc="outside lower center", ncols=2
)
plt.show()

# %% [markdown]
# ## Before you start: `keras-dist plan`
#
# The command computes the same for a model of any size, without making the
# model. In a terminal, write `keras-dist plan ...`. A notebook can call it like
# this:


# %%
def plan(*options):
    command = [sys.executable, "-m", "keras_dist.cli", "plan", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


print(plan("--params", "7e9", "--dtype", "bfloat16", "--devices", "8"))

# %% [markdown]
# Arithmetic does not know the activations. JAX can tell them: `keras-dist plan
# --target h100:8 --model my_models:make` compiles the step of your own model
# for 8 GPUs that need not be here. It says how much memory the step needs. [The
# guide](../docs/pages/guide/examples.md) describes it.
#
# `--json` prints the numbers. The picture shows what a device that computes
# holds during a step, without activations, for different numbers of devices.
# The dotted line is a GPU with 40 GB.

# %%
numbers_of_devices = [2, 4, 8, 16]
plans = [
    json.loads(
        plan(
            *("--params", "7e9", "--dtype", "bfloat16"),
            *("--devices", str(number), "--json"),
        )
    )["plans"]
    for number in numbers_of_devices
]
fig, axes = plt.subplots(figsize=(7, 3.6))
for name, marker in (
    ("mirrored", "o"),
    ("optimizer sharded", "s"),
    ("central", "^"),
):
    gigabytes = [
        of[name]["memory"]["device 0"]["in_a_step"] / 1e9 for of in plans
    ]
    axes.plot(numbers_of_devices, gigabytes, marker + "-", label=name)
axes.axhline(40, color="gray", linestyle=":")
axes.text(16, 41, "40 GB", color="gray", ha="right")
axes.set_xscale("log", base=2)
axes.set_xticks(numbers_of_devices, map(str, numbers_of_devices))
axes.set_ylim(0, 62)
axes.set_xlabel("devices that compute")
axes.set_ylabel("GB on each")
axes.set_title("7 billion parameters in bfloat16, Adam")
axes.legend(loc="lower left")
axes.spines[["top", "right"]].set_visible(False)
fig.tight_layout()
plt.show()

# %% [markdown]
# Is the plan right? We plan our small model, and compare the result with what
# `summary` counted after the training.

# %%
num_parameters = sum(int(np.prod(w.shape)) for w in start)
small = json.loads(
    plan("--params", str(num_parameters), "--devices", "4", "--json")
)["plans"]


def kept(summary, device):
    """Returns the bytes of weights and optimizer's state on a device."""
    groups = {each.device: each.of_groups for each in summary.devices}
    return groups[device][0] + groups[device][2]


places = {
    "plain Keras": ("one device", "cpu:0", "device 0"),
    "mirrored": ("mirrored", "cpu:0", "device 0"),
    "sharded": ("optimizer sharded", "cpu:0", "device 0"),
    "central": ("central", "cpu:4", "parameter device"),
}
planned, counted = {}, {}
for name, found in summaries.items():
    planned_name, device, planned_device = places[name]
    planned[name] = small[planned_name]["memory"][planned_device]["kept"]
    counted[name] = kept(found, device)
    print(f"{name:11} planned {planned[name]:,} B, counted {counted[name]:,} B")

# %% [markdown]
# To measure memory instead of counting it, run `python -m bench memory` in the
# folder `tests` of the repository. It trains under each strategy in a separate
# process, and asks the framework which memory is in use.
#
# ## Facts
#
# The next cell checks what the page claims. Next page: [models that
# do not fit](5b_models_that_do_not_fit.ipynb).

# %%
# All strategies train to the weights of plain Keras on one device.
for name, model in models.items():
    expected = models["plain Keras"].get_weights()
    for ours, theirs in zip(model.get_weights(), expected, strict=True):
        assert np.abs(ours - theirs).max() < 1e-4, name

# Mirrored: each device keeps what one device alone would.
alone = kept(summaries["plain Keras"], "cpu:0")
assert [kept(summaries["mirrored"], d) for d in compute] == [alone] * 4
# 4 bytes for each weight and each of Adam's numbers, and two more numbers.
assert 0 < alone - 3 * 4 * num_parameters <= 16

# Central: devices that compute keep nothing; the parameter device keeps all.
assert [kept(summaries["central"], d) for d in compute] == [0] * 4
assert kept(summaries["central"], "cpu:4") == alone

# Sharded: the weights, and a quarter of the optimizer's state. By the estimate,
# a step sends as much as an all-reduce does. Or the backend refuses to shard.
assert (refusal is None) == ("sharded" in models)
if refusal is None:
    part = kept(summaries["sharded"], "cpu:0") - 4 * num_parameters
    assert abs(part - 2 * 4 * num_parameters / 4) < 100
    sent = [summaries[name].bytes_sent for name in ("mirrored", "sharded")]
    assert abs(sent[0] - sent[1]) < 100
else:
    assert "sharded" in refusal

# The plan equals what was counted, except for bytes that make parts equal.
for name in planned:
    assert abs(planned[name] - counted[name]) < 100, name
