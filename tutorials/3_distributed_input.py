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
# # 3. Distributed input
#
# This page shows which data you can use, which replica gets which rows, and
# what happens if the replicas can't share the rows evenly. `fit` takes all of
# these kinds of data as well. Here we look at them batch by batch, as your own
# loop does.

# %%
import importlib.util
import sys

import keras_dist

keras_dist.set_virtual_devices(4)  # leave it out if you have GPUs

import keras
import numpy as np
from sklearn.datasets import load_digits

strategy = keras_dist.MirroredStrategy()
print("Backend:", keras.backend.backend())
print(strategy)

# %% [markdown]
# ## Data
#
# We use 22 pictures of digits, each with its row number, in batches of 8. The
# last batch has 6 rows.

# %%
NUM_ROWS, BATCH_SIZE = 22, 8
images = (load_digits().images[:NUM_ROWS] / 16.0).astype("float32")
rows = np.arange(NUM_ROWS, dtype="int32")
batches = [
    (images[i : i + BATCH_SIZE], rows[i : i + BATCH_SIZE])
    for i in range(0, NUM_ROWS, BATCH_SIZE)
]

# %% [markdown]
# ## The elements of a distributed dataset
#
# Each element is like a batch of the data, with a `PerReplica` in place of each
# array. A `PerReplica` has one part for each replica, on the replica's device.

# %%
dataset = strategy.experimental_distribute_dataset(batches)
print("Steps:", dataset.cardinality)
for _, row_numbers in dataset:
    print(row_numbers)

# %% [markdown]
# The 6 rows of the last batch can't be shared evenly by 4 replicas, so they are
# split as evenly as possible. No row is lost, no row comes twice, and nothing
# is padded. `explain` shows the same without reading the data to its end.

# %%
last_batch = batches[-1]
explained = strategy.explain([last_batch])
print(explained)

# %%
explained.plot()

# %% [markdown]
# A note above may say that `fit` gives other numbers of rows. `fit` does that
# for speed on that backend. It changes no result.
#
# These are the rows that each replica gets of all three batches:

# %%
owners = {}
for _, row_numbers in dataset:
    parts = strategy.experimental_local_results(row_numbers)
    for replica, part in enumerate(parts):
        for row in keras.ops.convert_to_numpy(part):
            assert int(row) not in owners
            owners[int(row)] = replica
for replica in range(4):
    print(replica, [row for row, owner in owners.items() if owner == replica])

# %% [markdown]
# ## All kinds of data
#
# All kinds of data give the same parts. First, these are the kinds that work
# without any further package. A function is called again for each pass over the
# data. A generator that is not wrapped in a function can be read only once.


# %%
class Digits(keras.utils.PyDataset):
    def __len__(self):
        return len(batches)

    def __getitem__(self, index):
        return batches[index]


arrays = strategy.experimental_make_numpy_dataset((images, rows))
kinds = {
    "list of batches": batches,
    "function that returns an iterable": lambda: iter(batches),
    "generator": (batch for batch in batches),
    "keras.utils.PyDataset": Digits(),
    "arrays, batched": arrays.batch(BATCH_SIZE),
}

# %% [markdown]
# Next, these are the kinds that come with a framework. They work with any
# backend. To save memory, we try them here only if their framework is already
# loaded.

# %%
if "tensorflow" in sys.modules:
    import tensorflow as tf

    pairs = tf.data.Dataset.from_tensor_slices((images, rows))
    kinds["tf.data.Dataset"] = pairs.batch(BATCH_SIZE)
if "torch" in sys.modules:
    import torch

    tensors = map(torch.from_numpy, (images, rows))
    kinds["torch DataLoader"] = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*tensors), batch_size=BATCH_SIZE
    )
if importlib.util.find_spec("grain"):
    import grain

    source = grain.MapDataset.source(list(zip(images, rows, strict=True)))
    kinds["grain.MapDataset"] = source.batch(BATCH_SIZE)

# %% [markdown]
# `gather` joins the parts again, in the order of the replicas.

# %%
seen = {}
for kind, data in kinds.items():
    sizes, order = [], []
    for _, row_numbers in strategy.experimental_distribute_dataset(data):
        parts = strategy.experimental_local_results(row_numbers)
        sizes.append([part.shape[0] for part in parts])
        joined = strategy.gather(row_numbers, axis=0)
        order += keras.ops.convert_to_numpy(joined).tolist()
    seen[kind] = (sizes, order)
    print(f"{kind:35} {sizes}")

# %% [markdown]
# ## Separate data for each replica
#
# `distribute_datasets_from_function` does not split anything. Your function
# makes batches that already belong to one replica. Its argument says for which
# worker it makes them.


# %%
def make_batches(context):
    size = context.get_per_replica_batch_size(BATCH_SIZE)
    print(context, "batch of a replica:", size)
    return [rows[i : i + size] for i in range(0, NUM_ROWS, size)]


from_function = strategy.distribute_datasets_from_function(make_batches)
sizes_from_function = [
    [part.shape[0] for part in element.values] for element in from_function
]
print(sizes_from_function)

# %% [markdown]
# The replicas took the 11 batches of 2 rows in turn: 4 in the first step, 4 in
# the second and 3 in the third. The replica without a batch got an array with
# no rows.
#
# ## A value for each replica
#
# Values other than batches can also differ between replicas. Here each replica
# has its own weight.

# %%
weights = strategy.experimental_distribute_values_from_function(
    lambda context: 10.0**context.replica_id_in_sync_group
)
print(weights)


# %%
def weighted_rows(row_numbers, weight):
    return weight * row_numbers.shape[0]


first = next(iter(from_function))
weighted = strategy.run(weighted_rows, args=(first, weights))
total = float(strategy.reduce("SUM", weighted, axis=None))
print(f"2 + 20 + 200 + 2000 = {total}")

# %% [markdown]
# ## Many workers
#
# A worker is a process, on this machine or on another one. All workers run the
# same script on the same data, and each takes the rows of its own replicas. So
# you don't have to shard anything by hand, and the numbers are those of one
# device.
#
# `keras_dist.launch` calls a function on several workers of this machine. Here
# there are 2 workers with 2 devices each. They only report what they get; the
# next page shows how they train.


# %%
def look(batches):
    import keras

    import keras_dist

    strategy = keras_dist.MultiWorkerMirroredStrategy()
    dataset = strategy.experimental_distribute_dataset(batches)
    own = [
        [keras.ops.convert_to_numpy(part).tolist() for part in numbers.values]
        for _, numbers in dataset
    ]
    contexts = []
    strategy.distribute_datasets_from_function(
        lambda context: contexts.append(context) or batches
    )
    explained = strategy.explain(*batches[0])
    return own, str(contexts[0]), explained


reports = keras_dist.launch(look, args=(batches,), workers=2, devices=2)
of_workers = [own for own, _, _ in reports]
for worker, own in enumerate(of_workers):
    print(f"worker {worker} has, for its two replicas:")
    for step in own:
        print("   ", step)

# %% [markdown]
# This is what worker 0 explains about the first batch. It knows the rows of all
# replicas, but not the devices of the other worker's replicas.

# %%
explained_by_worker = reports[0][2]
print(explained_by_worker)

# %%
explained_by_worker.plot()

# %% [markdown]
# Over all three batches, each replica has the same rows as if one worker had
# all four replicas:

# %%
owner_on_workers = {
    row: 2 * worker + replica
    for worker, own in enumerate(of_workers)
    for step in own
    for replica, part in enumerate(step)
    for row in part
}
print(owner_on_workers == owners)

# %% [markdown]
# With `distribute_datasets_from_function`, each worker calls the function with
# its own context. If a worker should not read all files, `num_input_pipelines`
# and `input_pipeline_id` say which of them it should read.

# %%
for _, context, _ in reports:
    print(context)

# %% [markdown]
# ## Facts
#
# The next cell checks what the page claims. Next page: [many
# workers](4_many_workers.ipynb).

# %%
# Each kind of data gives the same parts, and every row once, in order.
expected = ([[2, 2, 2, 2], [2, 2, 2, 2], [2, 1, 2, 1]], rows.tolist())
assert len(seen) >= 5
for kind, found in seen.items():
    assert found == expected, kind
assert sorted(owners) == rows.tolist()
assert [part.num_rows for part in explained] == [2, 1, 2, 1]

# Batches that a function makes are not split; replicas get them in turn.
assert sizes_from_function == [[2, 2, 2, 2], [2, 2, 2, 2], [2, 2, 2, 0]]
assert total == 2222.0

# 2 workers with 2 replicas have the rows of 4 replicas of one worker.
assert owner_on_workers == owners
assert sum(len(part) for own in of_workers for s in own for part in s) == 22
for _, _, parts in reports:
    assert [(part.worker, part.replica) for part in parts] == [
        (0, 0),
        (0, 1),
        (1, 2),
        (1, 3),
    ]
    assert [(part.first, part.last) for part in parts] == [
        (0, 1),
        (2, 3),
        (4, 5),
        (6, 7),
    ]
assert [context for _, context, _ in reports] == [
    f"keras_dist.InputContext(input pipeline id {i}, total: 2)"
    for i in range(2)
]
