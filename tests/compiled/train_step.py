"""Compiles a train step for TPUs that are not here; prints what is in it.

Takes `sharded` or `mirrored`, and the number of layers.
"""

import collections
import json
import os
import re
import sys

os.environ.pop("XLA_FLAGS", None)
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

import jax
import keras
from jax.experimental import topologies

import keras_dist
from keras_dist_jax import keras_internals as internals
from keras_dist_jax import shards
from keras_dist_jax.layout import MeshLayout
from keras_dist_jax.running import all_values
from keras_dist_jax.sharded import sharded_step
from keras_dist_jax.trainer import stateless

KIND, NUM_LAYERS = sys.argv[1], int(sys.argv[2])
COUNT, WIDTH, ROWS = 4, 256, 512
COLLECTIVES = r"= .*?\b(all-reduce|all-gather|reduce-scatter|all-to-all|"
COLLECTIVES += r"collective-permute)(?:-start)?\("


def small_model():
    """A model on virtual CPU devices, with a built optimizer."""
    strategy = keras_dist.MirroredStrategy(
        [f"cpu:{i}" for i in range(COUNT)], optimizer_state=KIND
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,))])
        for _ in range(NUM_LAYERS):
            model.add(keras.layers.Dense(WIDTH, activation="relu"))
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=[jax.numpy.ones((COUNT, WIDTH))] * 2)
    return model


def described(variable, layout):
    """A variable's array as the program gets it, without values."""
    shape, sharding = tuple(variable.shape), layout.whole
    if shards.is_sharded(variable):
        shape = shards.stored(variable).shape
        own = shards.Shards(tuple(variable.shape), layout)
        vars(variable)["_keras_dist_shards"] = own
        sharding = own.sharding
    return jax.ShapeDtypeStruct(shape, variable.dtype, sharding=sharding)


def compiled(model, layout):
    groups = [internals.variables_of(model, n) for n in internals.STATE_GROUPS]
    state = [[described(v, layout) for v in group] for group in groups]
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32", sharding=layout.cut)
    step = stateless(model, "train_step")
    if KIND == "sharded":
        step = sharded_step(layout, model, step)
    programs = layout.compile(
        all_values(step), donate=True, is_sharded=KIND == "sharded"
    )
    return programs.cut.lower(state, (rows, rows, None), None).compile()


topology = topologies.get_topology_desc("v5e:2x2", platform="tpu")
model = small_model()
program = compiled(model, MeshLayout(topology.devices))
batch = 2 * ROWS * WIDTH * 4 // COUNT
found = {
    "collectives": collections.Counter(
        re.findall(COLLECTIVES, program.as_text())
    ),
    "state": program.memory_analysis().argument_size_in_bytes - batch,
    "variables": sum(4 * v.value.size for v in model.trainable_variables),
}
print(json.dumps(found))
