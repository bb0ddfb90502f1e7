# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4. Many workers
#
# A worker is one process. Each worker runs the same script on the same data,
# and computes on its own rows of every batch. The gradients of all workers are
# added up, so all workers keep the same weights. Here the workers are processes
# of one machine. On several machines, the script stays the same.
#
# `KERAS_BACKEND` chooses the framework. The same notebook runs on all three.

# %%
import contextlib
import csv
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile

import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import keras_dist

# %% [markdown]
# The data are 500 small pictures of digits. The workers use `make_model`. We
# also use it here for plain Keras on one device, to compare the results.

# %%
BATCH_SIZE = 64  # the global batch: of all workers together
plt.style.use("petroff10")

digits = load_digits()
x, y = digits.data[:500].astype("float32") / 16, digits.target[:500]


def make_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


plain = make_model()
expected = plain.fit(x, y, batch_size=BATCH_SIZE, epochs=5, verbose=0).history
expected

# %% [markdown]
# ## From a notebook
#
# `launch` starts several workers, which are new processes. It sends a function
# and its arguments to them, and returns what each worker returned. In the
# function, make the strategy before anything else, because the workers connect
# at this point. Two workers with two devices each have four replicas.


# %%
def train(x, y):
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model()
    history = model.fit(x, y, batch_size=BATCH_SIZE, epochs=2, verbose=0)
    shares = strategy.explain(x, y, batch_size=BATCH_SIZE)
    return {
        "loss": history.history["loss"],
        "weights": model.get_weights(),
        "shares": shares,
    }


chief, other = keras_dist.launch(train, args=(x, y), workers=2, devices=2)
print("worker 0:", chief["loss"])
print("worker 1:", other["loss"])
print("one device:", expected["loss"][:2])

# %% [markdown]
# Both workers report the same losses, and these equal the losses of one device.
# `strategy.explain` returned which rows of a batch each replica computes.
# Worker 0 knows only its own devices:

# %%
chief["shares"].plot()

# %% [markdown]
# ## A script for the rest of this page
#
# Outside of notebooks, workers run a script. It differs from a script for a
# single device only in the strategy and its scope. `BackupAndRestore` and
# `CSVLogger` are Keras' own callbacks. Only the *chief*, worker 0, writes
# files.
#
# To show a failure, a worker kills itself in the third epoch if the environment
# variable `POWER_CUT` is set.

# %%
SCRIPT = f"""
import os, signal
import keras, numpy as np
import keras_dist

strategy = keras_dist.MultiWorkerMirroredStrategy()  # before anything else
print(f"This is {{strategy}}", flush=True)

digits = np.load("digits.npz")  # the same on each worker
x, y = digits["x"], digits["y"]
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([
        keras.Input((64,)),
        keras.layers.Dense(32, activation="tanh"),
        keras.layers.Dense(10),
    ])
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

class PowerCut(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (2, 1) and "POWER_CUT" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)

model.fit(
    x, y, batch_size={BATCH_SIZE}, epochs=5, verbose=0,
    callbacks=[
        keras.callbacks.BackupAndRestore("backup"),
        keras.callbacks.CSVLogger("log.csv", append=True),
        PowerCut(),
    ],
)
model.save("digits.keras")
"""
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "train.py").write_text(SCRIPT)
np.savez(folder / "digits.npz", x=x, y=y)

# %% [markdown]
# ## Clusters
#
# How do workers find each other? The program that starts them sets environment
# variables, and a *cluster resolver* reads them. `detect` chooses the resolver
# in the same way as the strategy. Here we give it the variables that four
# launchers would have set:

# %%
workers = {"worker": ["10.0.0.1:9000", "10.0.0.2:9000"]}
task = {"type": "worker", "index": 1}
launchers = {
    "keras-dist run": {
        "KERAS_DIST_WORKERS": "10.0.0.1:9000,10.0.0.2:9000",
        "KERAS_DIST_WORKER_INDEX": "1",
    },
    "tf.distribute": {
        "TF_CONFIG": json.dumps({"cluster": workers, "task": task})
    },
    "torchrun": {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "8999",
    },
    "srun (SLURM)": {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    },
}
found = {}
for launcher, variables in launchers.items():
    resolver, reason = keras_dist.cluster_resolver.detect(variables)
    addresses = resolver.cluster_spec().as_dict()["worker"]
    found[launcher] = resolver.task_id, len(addresses)
    print(f"{launcher:15} {type(resolver).__name__:25} {addresses}")
    print(f"{'':15} {reason}")

# %% [markdown]
# You don't need a launcher: two processes with `TF_CONFIG` are a cluster. We
# set `POWER_CUT` for worker 1.

# %%
sockets = []
while len(sockets) < 2:
    # The system gives no port of this range to a program that asks for any.
    port = random.randrange(20000, 32768)
    with contextlib.suppress(OSError):  # the port is taken
        sockets.append(socket.create_server(("127.0.0.1", port)))
addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
for each in sockets:
    each.close()

processes = []
for index in range(2):
    task = {"type": "worker", "index": index}
    cluster = {"cluster": {"worker": addresses}, "task": task}
    environment = {**os.environ, "TF_CONFIG": json.dumps(cluster)}
    if index == 1:
        environment["POWER_CUT"] = "1"
    processes.append(
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )
said = [process.communicate() for process in processes]
for index, (out, _) in enumerate(said):
    print(f"worker {index}: {out.splitlines()[-1]}")

# %% [markdown]
# ## Faults
#
# Worker 1 was killed by signal 9, while worker 0 waited for it in the middle of
# a step. Worker 0 does not hang: it raises a `WorkerLostError` that names the
# lost worker. Its exit status 42 means: start all workers again.

# %%
print("exit status:", [process.returncode for process in processes])
lines = [line for line in said[0][1].splitlines() if "WorkerLostError" in line]
print(lines[-1])

# %% [markdown]
# ## Resuming, from the command line
#
# `keras-dist run` starts all workers and shows what they print. If one worker
# fails, it ends the others. The script and its folder are the same as before,
# so `BackupAndRestore` continues after the last complete epoch.
#
# With `--max-restarts 3`, it would also have started the workers again by
# itself.

# %%
command = "keras-dist run --workers 2 train.py"
program, *arguments = command.split()
run = subprocess.run(
    [sys.executable, "-m", "keras_dist.cli", *arguments],
    cwd=folder,
    capture_output=True,
    text=True,
)
print(f"$ {command}\n{run.stdout}")

# %% [markdown]
# The workers were started twice, but it is one training. Its losses are those
# of plain Keras, which was never interrupted.

# %%
with open(folder / "log.csv") as file:
    log = [
        (int(row["epoch"]), float(row["loss"])) for row in csv.DictReader(file)
    ]
epochs, losses = zip(*log, strict=True)

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
axes.plot(expected["loss"], color="0.7", lw=9, label="plain Keras, one device")
axes.plot(epochs[:2], losses[:2], "o-", color="C0", label="first start")
axes.plot(epochs[2:], losses[2:], "o-", color="C1", label="second start")
axes.axvline(1.5, color="C2", ls="--")
axes.text(1.54, max(losses), "worker 1 is killed", color="C2", va="top")
axes.set(xlabel="epoch", ylabel="loss", xticks=range(5))
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# Some systems warn a machine with SIGTERM before they take it away. Then the
# epoch is not lost:
#
# ```python
# handler = keras_dist.experimental.PreemptionCheckpointHandler(
#     strategy.cluster_resolver, model, "preempted"
# )
# for epoch in range(handler.total_run_calls, 5):
#     handler.run(model.fit, x, y, batch_size=64)
# ```
#
# After a warning to any worker, all workers finish the call, the chief saves,
# and all workers end with status 42. When they are started again, they continue
# after that call.
#
# [Start many workers](../docs/pages/guide/many_workers.md) has the exact files
# for several hosts, SLURM, Kubernetes and torchrun.
#
# ## Facts
#
# The next cell checks what the page claims. Next page:
# [memory](5_memory.ipynb).

# %%
# Both of two workers with two devices give the numbers of one device.
for worker in (chief, other):
    np.testing.assert_allclose(worker["loss"], expected["loss"][:2], rtol=1e-4)
for ours, theirs in zip(chief["weights"], other["weights"], strict=True):
    np.testing.assert_array_equal(ours, theirs)

# Each row of a batch is computed once; each worker has half of the rows.
taken = [row for share in chief["shares"] for row in share.rows]
assert taken == list(range(BATCH_SIZE))
assert [share.num_rows for share in chief["shares"]] == [16] * 4

# Each resolver says: worker 1 of 2.
assert set(found.values()) == {(1, 2)}

# Worker 1 was killed; worker 0 names it, and asks for a new start.
assert [process.returncode for process in processes] == [42, -9]
assert "worker 1" in lines[-1]

# The second start trained only the missing epochs, to the same numbers.
assert run.returncode == 0, run.stderr
assert epochs == (0, 1, 2, 3, 4)
np.testing.assert_allclose(losses, expected["loss"], rtol=1e-4)
resumed = keras.models.load_model(folder / "digits.keras")
for ours, theirs in zip(
    resumed.get_weights(), plain.get_weights(), strict=True
):
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
