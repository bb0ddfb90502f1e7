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
# # 7. Writing a strategy, a backend, a resolver
#
# You can add three things of your own to keras_dist:
#
# - A **strategy** decides which devices compute, and where variables are
#   stored. It makes a `Plan`, which is plain data.
# - A **backend** executes plans with one framework. It does this with an
#   `Executor`.
# - A **cluster resolver** finds out who the workers are.
#
# This page has a small complete example of each. None of them needs hardware:
# `keras_dist.testing.MemoryBackend` is a backend that runs nothing and records
# the calls that it gets.

# %%
import pathlib
import tempfile

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_dist
from keras_dist.plugins import Plan
from keras_dist.plugins import get_backend
from keras_dist.plugins import override_backend
from keras_dist.plugins import parse_device
from keras_dist.testing import MemoryBackend

keras_dist.set_virtual_devices(4)  # for a machine without GPUs

# %% [markdown]
# ## A strategy
#
# Our strategy trains on all devices but one, which is kept free for something
# else. The whole class only makes a plan: a replica on each device, and a copy
# of each variable there.


# %%
class AllButOneStrategy(keras_dist.Strategy):
    """Mirrors a model on all devices of this worker but one.

    Args:
        spare: String, the device that is kept free, such as `"gpu:0"`.
    """

    def __init__(self, spare):
        kept = parse_device(spare)
        used = [d for d in get_backend().list_devices() if d != kept]
        super().__init__(
            Plan(
                # A replica has one device; later versions may allow several.
                replicas=tuple((device,) for device in used),
                # The copy on the first of these devices is saved.
                variable_devices=tuple(used),
            )
        )


# %% [markdown]
# Test it on a machine that you don't have: eight GPUs in memory.

# %%
gpus = [parse_device(f"gpu:{index}") for index in range(8)]
with override_backend(MemoryBackend(gpus)) as memory:
    eight = AllButOneStrategy("gpu:3")
    with eight.scope():
        variable = keras.Variable([1.0, 2.0])
print(eight)
print(
    "a batch of 100 rows:",
    [r.num_rows for r in eight.explain(np.ones((100, 1)))],
)
(executor,) = memory.executors
print("it was asked to place", len(executor.placed), "variable")

# %% [markdown]
# The strategy needs nothing more for training. Here it trains on four virtual
# CPU devices with the real backend, and we compare it with plain Keras.


# %%
def make_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


digits = load_digits()
x, y = digits.data[:200].astype("float32") / 16, digits.target[:200]

plain = make_model()
plain.fit(x, y, batch_size=32, epochs=2, verbose=0)

strategy = AllButOneStrategy("cpu:1")
with strategy.scope():
    spared = make_model()
spared.fit(x, y, batch_size=32, epochs=2, verbose=0)
strategy

# %% [markdown]
# `strategy.explain` shows what each device computes, and `summary` what it
# keeps. The spare device, `cpu:1`, has no line:

# %%
strategy.explain(x, batch_size=32).plot()

# %%
keras_dist.summary(spared).plot()

# %% [markdown]
# ## A backend
#
# A backend lists devices and makes executors. An executor has four abstract
# methods, for variables and devices. `MemoryExecutor` implements these four.
#
# Our backend, *Turns*, has real replicas. All of them are on one real device,
# and compute one after the other. *Turns* has to define three more things:
#
# - A `Replica` defines how one replica meets the others, and how it reads and
#   writes variables.
# - A `ReplicaRunner` defines how a function is called once for each replica,
#   and how gradients are summed. `Round` and `LockstepThreads` let replicas
#   take turns in threads.
# - `differentiate` computes gradients. We call the installed backend for this,
#   so that *Turns* works with every framework.

# %%
from keras_dist.plugins import Differentiates
from keras_dist.plugins import LockstepThreads
from keras_dist.plugins import Replica
from keras_dist.plugins import ReplicaRunner
from keras_dist.plugins import Round
from keras_dist.plugins import RowShard
from keras_dist.plugins import inherit_thread_state
from keras_dist.plugins import outside_replicas
from keras_dist.plugins import thread_state
from keras_dist.testing import MemoryExecutor


class TurnsReplica(Replica):
    """A replica that runs a function."""

    def __init__(self, index, round_):
        super().__init__(index, RowShard(1, 1))  # all rows of its part
        self.round = round_

    def rendezvous(self, what, fn, value):
        def hold(values):
            with outside_replicas():
                return fn(values)

        return self.round.rendezvous(self.index, what, hold, value)

    def read(self, variable):
        return None  # no copy of its own: use the variable's value

    def hold(self, variable, value):
        return value


class TurnsExecutor(MemoryExecutor, ReplicaRunner):
    """Executes a plan on one device, one replica at a time."""

    def __init__(self, plan):
        super().__init__(plan)
        self.sums = []
        self.pool = LockstepThreads(self.capture)

    @property
    def replicas(self):
        return self

    def capture(self):
        state = thread_state()  # what Keras keeps for each thread
        return lambda: inherit_thread_state(state)

    def put(self, value, device):
        return keras.ops.convert_to_tensor(value)

    def call(self, fn):
        round_ = Round(self.plan.num_replicas)

        def turn(index):
            return lambda: fn(TurnsReplica(index, round_))

        return self.pool.run(
            round_, [turn(index) for index in range(self.plan.num_replicas)]
        )

    def sum_gradients(self, replica, gradients, weights, variables):
        self.sums.append(len(gradients))
        return [
            sum(w * g for w, g in zip(weights, each, strict=True))
            for each in zip(*gradients, strict=True)
        ]


class TurnsBackend(MemoryBackend, Differentiates):
    """A backend with any number of replicas on one device.

    Args:
        num_devices: Integer, the number of devices to pretend.
    """

    def __init__(self, num_devices):
        super().__init__([parse_device(f"cpu:{i}") for i in range(num_devices)])
        self.framework = get_backend()
        self.clusters = []

    def executor(self, plan):
        return TurnsExecutor(plan)

    def differentiate(self, fn, variables, tensors):
        return self.framework.differentiate(fn, variables, tensors)

    def join(self, cluster, options):
        self.clusters.append(cluster)  # a real backend would connect


# %% [markdown]
# That is enough for every strategy, and for your own training loops. The step
# is the same as for any backend: `strategy.run` calls it once for each replica,
# and `optimizer.apply` sums the gradients of all replicas.


# %%
def train_step(x, y):
    def loss_fn():
        per_example = keras.losses.sparse_categorical_crossentropy(
            y, model(x, training=True), from_logits=True
        )
        return keras_dist.compute_average_loss(per_example)

    loss, gradients = keras_dist.value_and_grad(
        loss_fn, model.trainable_variables
    )
    model.optimizer.apply(gradients, model.trainable_variables)
    return loss


batches = [(x[i : i + 32], y[i : i + 32]) for i in range(0, 200, 32)]
reference = make_model()
expected = []
for batch in batches:
    reference.reset_metrics()  # Keras 3.14 would give the mean over calls
    expected.append(reference.train_on_batch(*batch))

with override_backend(TurnsBackend(3)):
    turns = keras_dist.MirroredStrategy()
    with turns.scope():
        model = make_model()
    losses = []
    for batch in turns.experimental_distribute_dataset(batches):
        per_replica = turns.run(train_step, args=batch)
        losses.append(float(turns.reduce("SUM", per_replica, axis=None)))
print(turns)
print("turns:      ", np.round(losses, 4))
print("plain Keras:", np.round(expected, 4))

# %% [markdown]
# The last batch has 8 rows for 3 replicas, and the numbers are still those of
# one device. The front end, not the backend, takes care of shares, weights and
# errors.
#
# To train with `fit`, an executor must be a `StepRunner`. That is a
# `ReplicaRunner` whose `run` splits a global batch. The front end replaces the
# steps of its models. If a framework has its own trainer, the executor returns
# other methods from `bind`. `tests/conformance/fourth.py` is a small backend
# that trains with `fit` and passes the tests of the contract of
# `tf.distribute`. The three backends of keras_dist are larger examples, and
# import nothing that your backend can't import. keras_dist finds your backend
# by the name that Keras uses for it, in any installed distribution:
#
# ```toml
# [project.entry-points."keras_dist.backends"]
# turns = "my_package:TurnsBackend"
# ```
#
# ## A resolver
#
# Our resolver reads the workers from a file with one line for each worker. The
# program that starts a worker passes it the number of its line.


# %%
class HostFileResolver(keras_dist.cluster_resolver.ClusterResolver):
    """Reads the workers from a file.

    Args:
        path: String or path; `host:port` on each line, the chief first.
        line: Integer, this worker's line, from 0.
    """

    def __init__(self, path, line):
        self._path = pathlib.Path(path)
        self.task_type = "worker"
        self.task_id = line

    def cluster_spec(self):
        addresses = self._path.read_text().split()
        return keras_dist.cluster_resolver.ClusterSpec({"worker": addresses})

    def master(self, task_type=None, task_id=None, rpc_layer=None):
        return self.address_of(task_type, task_id, rpc_layer)


hosts = pathlib.Path(tempfile.mkdtemp(), "hosts")
hosts.write_text("10.0.0.1:9000\n10.0.0.2:9000\n10.0.0.3:9000\n")
resolver = HostFileResolver(hosts, line=2)
print(resolver.master(), "of", resolver.cluster_spec())

# %% [markdown]
# A strategy takes the resolver. *Turns* only notes which cluster it was asked
# to join, so one process is enough to try it:

# %%
with override_backend(TurnsBackend(2)) as backend:
    many = keras_dist.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
print(many)
print("replicas of all workers:", many.num_replicas_in_sync)
(cluster,) = backend.clusters
print("this is the chief:", cluster.is_chief)

# %% [markdown]
# On three hosts, with a real backend, the same line starts the training.
#
# ## Facts
#
# The next cell checks what the page claims.

# %%
# On any machine, the strategy does not use the spare device ...
assert "gpu:3" not in eight.devices_of(variable)
assert [row.num_rows for row in eight.explain(np.ones((100, 1)))] == [
    *(15, 14, 14, 15, 14, 14, 14)
]
kernel = spared.trainable_variables[0]
assert strategy.devices_of(kernel) == ("cpu:0", "cpu:2", "cpu:3")
# ... and trains to the weights of one device.
for ours, theirs in zip(spared.get_weights(), plain.get_weights(), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)

# The backend also does, and sums gradients once in each step.
np.testing.assert_allclose(losses, expected, rtol=1e-4)
assert turns.executor.sums == [3] * len(batches)
for ours, theirs in zip(
    model.get_weights(), reference.get_weights(), strict=True
):
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)

# The strategy uses the resolver's cluster.
assert cluster.addresses == tuple(hosts.read_text().split())
assert (cluster.index, many.num_replicas_in_sync) == (2, 6)
