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
# # 6b. Coming from DDP, keras.distribution or Accelerate
#
# All of these libraries train data-parallel: each device computes on its own
# rows, and the gradients are added up. In keras_dist, you choose the devices
# once:
#
# ```python
# strategy = keras_dist.MirroredStrategy()  # one machine
# strategy = keras_dist.MultiWorkerMirroredStrategy()  # one process of several
# with strategy.scope():
#     model = ...
#     model.compile(...)
# model.fit(x, y, batch_size=64)  # the global batch
# ```
#
# The same script runs on JAX, TensorFlow and PyTorch, in one process or in
# many, and gives the numbers of one device.
#
# ## What to delete from your script
#
# | | your script has | with keras_dist |
# |---|---|---|
# | **DDP** | `init_process_group`, `set_device`, `.to(rank)` | the strategy |
# | | `DistributedDataParallel(model)` | `with strategy.scope()` |
# | | `DistributedSampler`, `set_epoch` | nothing: give each worker all data |
# | | `batch_size // world_size` | `batch_size`, the global one |
# | | `all_reduce` of losses and metrics | nothing: logs are global |
# | | `if rank == 0:` around `save` | nothing: the chief alone writes |
# | | `torchrun --nproc-per-node 2` | same, or `keras-dist run --workers 2` |
# | **keras.distribution** | `set_distribution(...)` | `with strategy.scope()` |
# | | `drop_remainder=True` | nothing: any batch size works |
# | **Accelerate** | `accelerator.prepare(...)` | `with strategy.scope()` |
# | | `backward(loss)` | `fit`, or `keras_dist.value_and_grad` |
# | | `gather_for_metrics(...)` | nothing, or `strategy.gather` |
# | | `is_main_process` | `strategy.extended.should_checkpoint` |
# | | `accelerate launch` | `keras-dist run --workers 2` |

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import keras_dist

keras_dist.set_virtual_devices(4)  # before any device is used
plt.style.use("petroff10")

digits = load_digits()
# 130 rows: in batches of 64, the last one has 2 rows, for 4 replicas.
x, y = digits.data[:130].astype("float32") / 16, digits.target[:130]


def make_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


# %% [markdown]
# This is the complete code for keras_dist, and plain Keras on one device to
# compare with:

# %%
plain = make_model()
expected = plain.fit(x, y, batch_size=64, shuffle=False, verbose=0).history

strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"])
with strategy.scope():
    model = make_model()
found = model.fit(x, y, batch_size=64, shuffle=False, verbose=0).history
print("one device:", expected)
print("keras_dist:", found)

# %% [markdown]
# ## DDP: who gets which rows
#
# `DistributedSampler` deals rows out like cards, and repeats some rows so that
# all ranks have the same number. keras_dist splits each global batch into
# consecutive pieces, and each row counts once. A replica may have fewer rows
# than others, or none.
#
# This is one epoch over 14 rows, with 4 ranks and a global batch of 8:


# %%
def sampler(rows, rank, ranks):
    """Returns the rows that DistributedSampler gives a rank, unshuffled."""
    each = -(-rows // ranks)
    dealt = [row % rows for row in range(each * ranks)]
    return dealt[rank::ranks]


ddp_rows = [sampler(14, rank, 4) for rank in range(4)]

our_rows = [[] for _ in range(4)]
for start, stop in [(0, 8), (8, 14)]:
    batch = np.arange(start, stop)[:, None]
    for share in strategy.explain(batch):
        our_rows[share.replica] += batch[list(share.rows), 0].tolist()
print("DDP:       ", ddp_rows)
print("keras_dist:", our_rows)

# %% [markdown]
# Each dot is a row that is computed. Red rows were computed before, so they
# count twice in the gradient.

# %%
figure, pair = plt.subplots(
    1, 2, figsize=(8, 2.6), layout="constrained", sharey=True
)
for axes, title, ranks in zip(
    pair, ("DDP", "keras_dist"), (ddp_rows, our_rows), strict=True
):
    # In the order of time: first the first row of each rank, then the second.
    turns = sorted(
        (turn, rank, row)
        for rank, rows in enumerate(ranks)
        for turn, row in enumerate(rows)
    )
    seen = set()
    for _, rank, row in turns:
        color = "C2" if row in seen else "C0"
        axes.plot(row, rank, "o", color=color, ms=13, alpha=0.85)
        axes.text(
            *(row, rank, row), color="white", ha="center", va="center", size=8
        )
        seen.add(row)
    axes.set(title=title, xlabel="row of the data", xticks=range(14))
    axes.set(ylim=(3.6, -0.6), yticks=range(4))
    axes.grid(alpha=0.3)
pair[0].set_ylabel("rank or replica")
plt.show()

# %% [markdown]
# ## DDP: what is averaged
#
# A DDP script computes the mean loss over each rank's rows, and DDP averages
# the gradients over the ranks:
#
# ```python
# model = DistributedDataParallel(model)
# for x, y in DataLoader(data, batch_size=64 // world_size, sampler=sampler):
#     optimizer.zero_grad()
#     loss = criterion(model(x), y)  # the mean of this rank's rows
#     loss.backward()  # averages gradients over ranks
#     optimizer.step()
# ```
#
# The next cell runs four ranks in turn in this process. It is written with
# Keras, so that it runs on each backend. From each batch, every rank takes the
# rows that DDP would give it.


# %%
def fit_like_ddp(rows, ranks=4):
    model = make_model()
    variables = model.trainable_variables
    mine = [sampler(rows, rank, ranks) for rank in range(ranks)]
    each = 64 // ranks
    for start in range(0, len(mine[0]), each):
        of_ranks = []
        for indices in mine:
            part = indices[start : start + each]

            def loss_fn(part=part):
                logits = model(x[part], training=True)
                return keras.ops.mean(
                    keras.losses.sparse_categorical_crossentropy(
                        y[part], logits, from_logits=True
                    )
                )

            of_ranks.append(keras_dist.gradient(loss_fn, variables))
        averaged = [sum(g) / ranks for g in zip(*of_ranks, strict=True)]
        model.optimizer.apply(averaged, variables)
    return model.get_weights()


def fit_on_one_device(rows):
    model = make_model()
    model.fit(x[:rows], y[:rows], batch_size=64, shuffle=False, verbose=0)
    return model.get_weights()


def difference(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return max(float(np.abs(one - other).max()) for one, other in pairs)


ddp = {
    rows: difference(fit_like_ddp(rows), fit_on_one_device(rows))
    for rows in (128, 130)
}
ours = difference(model.get_weights(), plain.get_weights())
print("DDP, 128 rows (they divide):     ", ddp[128])
print("DDP, 130 rows (two are repeated):", ddp[130])
print("keras_dist, 130 rows:            ", ours)

# %% [markdown]
# If the ranks can share the rows evenly, both give the same training. If not,
# DDP's training differs a little in each epoch. Its metrics differ too: each
# rank has its own, until you reduce them.
#
# On PyTorch, this is the real sampler:

# %%
if keras.backend.backend() == "torch":
    from torch.utils.data import DistributedSampler

    real = [
        list(DistributedSampler(range(14), 4, rank, shuffle=False))
        for rank in range(4)
    ]
    print(real)

# %% [markdown]
# ## keras.distribution
#
# Keras' own data parallelism is for JAX. There it is exact for batches that the
# devices can share evenly. Other batches are an error in the middle of an
# epoch:

# %%
keras_error = None
if keras.backend.backend() == "jax":
    theirs = keras.distribution.DataParallel(
        devices=keras.distribution.list_devices("cpu")
    )
    keras.distribution.set_distribution(theirs)
    try:
        even = make_model()
        even.fit(x[:128], y[:128], batch_size=64, shuffle=False, verbose=0)
        from_keras = even.get_weights()
        uneven = make_model()
        uneven.fit(x, y, batch_size=64, shuffle=False, verbose=0)
    except Exception as error:
        keras_error = error
        print(type(error).__name__, str(error)[:200])
    finally:
        keras.distribution.set_distribution(None)

# %% [markdown]
# Model parallelism (`keras.distribution.ModelParallel`, a `LayoutMap`) splits
# the variables of a layer over devices. keras_dist can't do that yet. If the
# optimizer's variables don't fit, `optimizer_state="sharded"` keeps a part of
# them on each device.
#
# ## Accelerate, and other loops in PyTorch
#
# ```python
# model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
# for x, y in loader:
#     optimizer.zero_grad()
#     loss = criterion(model(x), y)
#     accelerator.backward(loss)
#     optimizer.step()
# ```
#
# With keras_dist, your own loop looks like this on each backend. It also takes
# your `DataLoader`, whose batch size is then the global one.

# %%
with strategy.scope():
    model = make_model()


@keras_dist.function
def step(x, y):
    def loss_fn():
        per_example = keras.losses.sparse_categorical_crossentropy(
            y, model(x, training=True), from_logits=True
        )
        return keras_dist.compute_average_loss(per_example)

    variables = model.trainable_variables
    loss, gradients = keras_dist.value_and_grad(loss_fn, variables)
    model.optimizer.apply(gradients, variables)
    return loss


loader = [(x[i : i + 64], y[i : i + 64]) for i in range(0, len(x), 64)]
for batch in strategy.experimental_distribute_dataset(loader):
    loss = strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)
loop = difference(model.get_weights(), plain.get_weights())

# %% [markdown]
# ## What differs
#
# | | DDP, Accelerate | keras.distribution | keras_dist |
# |---|---|---|---|
# | `batch_size` means | a rank's rows | the global batch | the global batch |
# | gradients | mean of the ranks' means | of all rows | of all rows |
# | rows that can't be shared evenly | repeated | an error | exact |
# | each epoch's shuffle | `set_epoch(epoch)` | Keras' | Keras' |
# | metrics and losses in logs | each rank's own | global | global |
# | BatchNormalization | a rank's rows | global | global |
# | a rank that dies | a timeout | an abort | `WorkerLostError` names it |
# | who writes files | you decide | every process | the chief |
# | devices of one process | one | all | all |
#
# ## Facts
#
# The next cell checks what the page claims.

# %%
# `fit` and your own loop train as one device does, for any batch size.
for name, values in expected.items():
    np.testing.assert_allclose(found[name], values, rtol=1e-4)
assert ours < 1e-5
assert loop < 1e-5

# keras_dist computes each row once; DDP's sampler repeats two of 14.
assert sorted(row for rows in our_rows for row in rows) == list(range(14))
assert sum(map(len, ddp_rows)) == 16

# Repeated rows change the training; without them it is the same.
assert ddp[128] < 1e-5 < 1e-4 < ddp[130]

if keras.backend.backend() == "torch":
    assert real == ddp_rows
if keras.backend.backend() == "jax":
    assert difference(from_keras, fit_on_one_device(128)) < 1e-5
    assert keras_error is not None
