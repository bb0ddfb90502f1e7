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
# # 2. One loop, three backends
#
# `fit` is not always enough. On this page, we write a training loop by hand,
# for several devices. The same source code runs on JAX, TensorFlow and PyTorch.
# On JAX and TensorFlow, it runs compiled.
#
# You need two more words:
#
# - **replica context**: the code inside of a function that `strategy.run`
#   calls. `run` calls it once for each replica, and it sees that replica's
#   share of the rows.
# - **cross-replica context**: the code everywhere else. There you see all
#   replicas.

# %%
import keras_dist

keras_dist.set_virtual_devices(4)  # leave it out if you have GPUs

import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

plt.style.use("petroff10")
strategy = keras_dist.MirroredStrategy()
print("Backend:", keras.backend.backend())
print(strategy)

# %% [markdown]
# ## `run`: call a function on each replica
#
# `run` returns a `PerReplica`, which has one value for each replica.


# %%
def square_of_id():
    context = keras_dist.get_replica_context()
    return context.replica_id_in_sync_group**2


squares = strategy.run(square_of_id)
print(squares)

# %% [markdown]
# ## `reduce`: combine the values of all replicas
#
# `axis=None` combines the replicas' values as they are.

# %%
total = strategy.reduce("SUM", squares, axis=None)
mean = strategy.reduce("MEAN", squares, axis=None)
print(f"0 + 1 + 4 + 9 = {int(total)}, and their mean is {float(mean)}")

# %% [markdown]
# ## Replicas can exchange values
#
# Inside of `run`, `all_reduce` waits for all replicas, and gives each of them
# the sum. Here each replica computes which part of all rows it has.


# %%
def part_of_rows(x):
    context = keras_dist.get_replica_context()
    own = keras.ops.convert_to_tensor(float(x.shape[0]))
    return own / context.all_reduce("SUM", own)


rows = np.zeros((8, 3))
batch = next(iter(strategy.experimental_distribute_dataset([rows])))
parts = strategy.run(part_of_rows, args=(batch,))
print([float(part) for part in strategy.experimental_local_results(parts)])

# %% [markdown]
# ## Data
#
# You can use any iterable of batches. `experimental_distribute_dataset` splits
# each batch into one share for each replica. Here the last batch has 7 rows.

# %%
digits = load_digits()
x = (digits.data[:1507] / 16.0).astype("float32")
y = digits.target[:1507].astype("int32")
batches = [(x[i : i + 100], y[i : i + 100]) for i in range(0, len(x), 100)]
print(len(batches), "batches, the last of", len(batches[-1][0]), "rows")

# %% [markdown]
# ## Model, optimizer, metric
#
# Make everything that has variables in the scope of the strategy.


# %%
def build(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(32, activation="tanh"),
                keras.layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.SGD(0.5)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    return model, optimizer, accuracy


# %% [markdown]
# ## The step of one replica
#
# - `value_and_grad` calls `loss_fn`, and returns its value and the gradients.
#   It works on each backend, although each framework has its own way to compute
#   gradients.
# - `compute_average_loss` divides by the rows of *all* replicas. So the sum of
#   the replicas' losses is the mean over the global batch, even if their shares
#   differ.
# - `optimizer.apply` adds up the gradients of all replicas before it updates
#   the variables.
# - `keras_dist.function` compiles the step, for all replicas together.

# %%
python_calls = 0


def make_step(model, optimizer, accuracy):
    @keras_dist.function
    def train_step(x, y):
        global python_calls
        python_calls += 1

        def loss_fn():
            logits = model(x, training=True)
            accuracy.update_state(y, logits)
            losses = keras.losses.sparse_categorical_crossentropy(
                y, logits, from_logits=True
            )
            return keras_dist.compute_average_loss(losses)

        variables = model.trainable_variables
        loss, gradients = keras_dist.value_and_grad(loss_fn, variables)
        optimizer.apply(gradients, variables)
        return loss

    return train_step


# %% [markdown]
# ## The loop
#
# `run` returns a loss for each replica, and `reduce` adds the losses up. Each
# replica updates the metric. When we read it here, it covers all rows.


# %%
def train(strategy, train_step, accuracy, epochs):
    """Returns each step's loss, each epoch's accuracy, and rows by replica."""
    losses, accuracies, rows = [], [], 0
    for _ in range(epochs):
        accuracy.reset_state()
        for batch in strategy.experimental_distribute_dataset(batches):
            per_replica = strategy.run(train_step, args=batch)
            loss = strategy.reduce("SUM", per_replica, axis=None)
            losses.append(float(loss))
            shares = strategy.experimental_local_results(batch[0])
            rows += np.array([share.shape[0] for share in shares])
        accuracies.append(float(accuracy.result()))
    return losses, accuracies, rows


# %%
EPOCHS = 2
keras.utils.set_random_seed(0)  # the same initial weights in each run
model, optimizer, accuracy = build(strategy)
initial_weights = model.get_weights()

losses, accuracies, rows_of_4 = train(
    strategy, make_step(model, optimizer, accuracy), accuracy, EPOCHS
)
print("Loss of the first and the last step:", losses[0], losses[-1])
print("Accuracy of each epoch:", accuracies)
print("Rows that each replica computed:", rows_of_4)

# %% [markdown]
# ## How often did Python run?
#
# On JAX and TensorFlow, the step is compiled, and Python runs only while the
# step is traced. On PyTorch, Python runs in every step, once for each replica.

# %%
num_steps = EPOCHS * len(batches)
calls_of_4 = python_calls
print(f"{num_steps} steps of 4 replicas called Python {calls_of_4} times")

# %% [markdown]
# ## The same with plain Keras
#
# This is plain Keras on one device, from the same weights, on the same batches.

# %%
plain = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(32, activation="tanh"),
        keras.layers.Dense(10),
    ]
)
plain.set_weights(initial_weights)
plain.compile(
    optimizer=keras.optimizers.SGD(0.5),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
plain_losses, plain_accuracies = [], []
rows_of_batches = [len(batch[0]) for batch in batches]
for _ in range(EPOCHS):
    found = []
    for batch in batches:
        plain.reset_metrics()  # Keras 3.14 would give the mean over calls
        found.append(plain.train_on_batch(*batch, return_dict=True))
    plain_losses += [each["loss"] for each in found]
    of_batches = [each["accuracy"] for each in found]
    plain_accuracies.append(np.average(of_batches, weights=rows_of_batches))


def largest_difference(a, b):
    pairs = zip(a.get_weights(), b.get_weights(), strict=True)
    return max(np.abs(one - other).max() for one, other in pairs)


print("Accuracy of each epoch:", plain_accuracies)
print(f"Largest difference in weights: {largest_difference(model, plain):.1e}")

# %% [markdown]
# ## More replicas, fewer rows for each
#
# Now we use 1 and 2 replicas. The source code does not change. With one
# replica, `run` just calls the function and wraps nothing.

# %%
found = {4: (losses, rows_of_4, model)}
for num_replicas in (1, 2):
    names = [f"cpu:{index}" for index in range(num_replicas)]
    smaller = keras_dist.MirroredStrategy(names)
    other, its_optimizer, its_accuracy = build(smaller)
    other.set_weights(initial_weights)
    step = make_step(other, its_optimizer, its_accuracy)
    its_losses, _, its_rows = train(smaller, step, its_accuracy, EPOCHS)
    found[num_replicas] = (its_losses, its_rows, other)
    print(f"{num_replicas} replicas: rows of each {its_rows}")

# %% [markdown]
# The losses of all these trainings are on top of one another:

# %%
fig, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
steps = range(1, num_steps + 1)
axes.plot(steps, plain_losses, lw=9, alpha=0.3, label="plain Keras")
for num_replicas, style in ((1, "C1-"), (2, "C2--"), (4, "k:")):
    label = f"{num_replicas} replica{'s' if num_replicas > 1 else ''}"
    axes.plot(steps, found[num_replicas][0], style, lw=2.5, label=label)
axes.set(xlabel="step", ylabel="loss of the global batch")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Facts
#
# The next cell checks what the page claims. Next page: [distributed
# input](3_distributed_input.ipynb).

# %%
assert strategy.experimental_local_results(squares) == (0, 1, 4, 9)
assert int(total) == 14 and float(mean) == 3.5
assert [float(part) for part in parts.values] == [0.25] * 4

# Losses, accuracies and weights are those of plain Keras on one device.
assert np.allclose(losses, plain_losses, rtol=1e-4)
assert np.allclose(accuracies, plain_accuracies, atol=1e-6)

for num_replicas, (its_losses, its_rows, its_model) in found.items():
    assert largest_difference(its_model, plain) < 1e-5
    assert np.allclose(its_losses, losses, rtol=1e-4)
    # Every row was computed once in each epoch. In each step, shares differ by
    # at most one row.
    assert len(its_rows) == num_replicas
    assert sum(its_rows) == EPOCHS * len(x)
    assert max(its_rows) - min(its_rows) <= num_steps

# A compiled step runs Python only while it is traced, not in every step.
is_compiled = calls_of_4 < num_steps
assert is_compiled or calls_of_4 == 4 * num_steps
