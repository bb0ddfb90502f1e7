"""What tests read of JAX: compiled programs, and bytes on devices."""

import gc
import re

import jax
import numpy as np

# Batches of so many rows are not counted.
BATCH_SIZE = 16


def programs(name):
    """The compiled programs of that name, newest last."""
    live = jax.devices()[0].client.live_executables()
    return [e for e in live if e.hlo_modules()[0].name == f"jit_{name}"]


def compiled(name, call):
    """The programs of that name that a call compiles."""
    before = programs(name)
    call()
    return [e for e in programs(name) if e not in before]


def step_of(model, x, y, rows=BATCH_SIZE):
    """The one program that `fit` compiles for a model's training step."""

    def fit():
        model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)

    (program,) = compiled("train_step", fit)
    return program


def text_of(program):
    return program.hlo_modules()[0].to_string()


def collectives_in(program):
    """Kinds and bytes of a program's collectives."""
    found = []
    pattern = r"= (.*) (all-reduce|reduce-scatter|all-gather|all-to-all|\S*"
    pattern += r"permute)(?:-start)?\("
    for results, kind in re.findall(pattern, text_of(program)):
        sizes = re.findall(r"f32\[([\d,]*)\]", results)
        count = sum(
            int(np.prod([int(n) for n in size.split(",") if n]))
            for size in sizes
        )
        found.append((kind, 4 * count))
    return found


def bytes_sent(found, kind):
    return sum(size for each, size in found if each == kind)


def count_all_reduces(program):
    return len(re.findall(r"\ball-reduce(?:-start)?\(", text_of(program)))


def size_of(variables):
    """Bytes of whole variables."""
    return sum(
        int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in variables
    )


def bytes_on_each():
    """Live bytes by device, of each buffer once, but for those of batches.

    From Keras 3.16, a batch is on one device before it is on all of them, and
    lives until it is there, at any time of the next steps.
    """
    gc.collect()
    buffers = {}
    for array in jax.live_arrays():
        if array.shape[:1] == (BATCH_SIZE,):
            continue
        for shard in array.addressable_shards:
            data = shard.data
            key = shard.device, data.unsafe_buffer_pointer()
            buffers[key] = max(buffers.get(key, 0), data.nbytes)
    found = dict.fromkeys(jax.devices(), 0)
    for (device, _), size in buffers.items():
        found[device] += size
    return np.array(list(found.values()))
