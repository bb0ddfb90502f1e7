"""Compiles steps for machines that are not here; prints what is in them.

Takes names of targets, and prints a line of JSON for each: a program's numbers
by strategy and by the way to train.
"""

import dataclasses
import json
import os
import sys

# The tests' flags would change what the compilers do.
os.environ.pop("XLA_FLAGS", None)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import keras

import keras_dist
from keras_dist.cli.jobs.plan import without_values
from keras_dist.cli.jobs.target import compiled_for
from keras_dist.cli.jobs.target import strategy_of
from keras_dist.planning.report import choice_on
from keras_dist.planning.targets import read_target
from keras_dist.plugin.backend import get_backend
from keras_dist_jax.fit.trainer import stateless
from keras_dist_jax.machine import current_machine
from keras_dist_jax.placement.per_replica import JoinedPerReplica
from steps import classifier_step

WIDTH, CLASSES, ROWS, STEPS = 256, 10, 32, 3
WIDE, NUM_BLOCKS = 1024, 8
# Strategies, and what they split over the replicas.
ON_ONE_HOST = {
    "one device": ("one-device", None),
    "mirrored": ("mirrored", None),
    "sharded": ("mirrored", "optimizer"),
    "sharded variables": ("mirrored", "variables"),
    "central": ("central", None),
}
ON_HOSTS = {
    "mirrored": ("multi-worker", None),
    "sharded": ("multi-worker", "optimizer"),
    "sharded variables": ("multi-worker", "variables"),
}


def layers():
    """A model's layers, of which one meets for its statistics."""
    return keras.Sequential(
        [
            keras.Input((WIDTH,)),
            keras.layers.Dense(WIDTH, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(WIDTH, activation="relu"),
            keras.layers.Dense(CLASSES),
        ]
    )


def model():
    """A compiled model."""
    made = layers()
    made.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return made


def wide():
    """A compiled model whose variables are large for a TPU."""
    made = keras.Sequential([keras.Input((WIDE,))])
    for _ in range(3):
        made.add(keras.layers.Dense(WIDE, activation="relu"))
    made.compile("adam", "mse")
    return made


class Block(keras.layers.Layer):
    """Two layers that are computed again in the backward pass."""

    def build(self, shape):
        width = shape[-1]
        self.up = self.add_weight(shape=(width, 4 * width))
        self.down = self.add_weight(shape=(4 * width, width))

    def call(self, x):
        def compute(x):
            return x + keras.ops.gelu(x @ self.up) @ self.down

        return jax.checkpoint(compute)(x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def block_layers():
    """A model of such blocks."""
    made = keras.Sequential([keras.Input((WIDE,))])
    for _ in range(NUM_BLOCKS):
        made.add(Block())
    return made


def blocks():
    """The same, compiled."""
    made = block_layers()
    made.compile("adam", "mse")
    return made


def recurrent():
    """A compiled model whose layers read their variables in a loop."""
    inputs = keras.Input((8, WIDTH))
    rows = keras.layers.LSTM(WIDTH, return_sequences=True)(inputs)
    rows = keras.layers.GRU(WIDTH)(rows)
    made = keras.Model(inputs, rows)
    made.compile("adam", "mse")
    return made


def attention(**options):
    """A model with attention, for which Keras has a kernel for TPUs."""
    inputs = keras.Input((128, 128))
    layer = keras.layers.MultiHeadAttention(1, 128, **options)
    made = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs, inputs)))
    made.compile("sgd", "mse")
    return made


def flash():
    """The same, asked to use the kernel."""
    return attention(flash_attention=True)


def attentive():
    """Layers in which Keras' kernel for TPUs is used."""
    inputs = keras.Input((128, 128))
    rows = keras.layers.MultiHeadAttention(1, 128)(inputs, inputs)
    rows = keras.layers.GlobalAveragePooling1D()(rows)
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(rows))


def huge():
    """A model that fits no device: it is made without values."""
    inputs = keras.Input((8,), dtype="int32")
    rows = keras.layers.Embedding(2**23, 4096)(inputs)
    made = keras.Model(inputs, keras.layers.Dense(1)(rows))
    made.compile("sgd", "mse")
    return made


class Stack(keras.layers.Layer):
    """Equal layers as one, in a scan."""

    def build(self, shape):
        width = shape[-1]
        self.kernel = self.add_weight(shape=(LAYERS, width, width))

    def call(self, x):
        def layer(x, kernel):
            return x + keras.ops.tanh(x @ kernel), None

        return keras.ops.scan(layer, x, self.kernel.value)[0]


LAYERS = 1024


def scanned():
    """A compiled model of 69 billion parameters in equal layers."""
    made = keras.Sequential([keras.Input((8192,)), Stack()])
    made.compile("adam", "mse")
    return made


def of_fit(target, strategy, split, rows, make=model):
    """The programs of a step of `fit`."""
    spec = f"{__name__}:{make.__name__}"
    return compiled_for(spec, target, strategy, split, rows)[0]


def of_function(target, strategy, split, rows, steps=None, make=layers):
    """The program of a function, or of a scan over several batches."""
    backend = get_backend()
    with backend.on_target(target) as workers:
        choice = choice_on(target, workers, strategy, split)
        strategy = strategy_of(choice, target)
        with without_values(), strategy.scope():
            made, optimizer = make(), keras.optimizers.Adam()
            optimizer.build(made.trainable_variables)
            mean = keras.metrics.Mean()

        update = classifier_step(made, optimizer)

        @keras_dist.function
        def step(x, y):
            loss = update(x, y)
            mean.update_state(loss)
            return loss

        layout = strategy.executor.layout
        batch = [
            described(layout, (rows, *made.input_shape[1:]), "float32"),
            described(layout, (rows,), "int32"),
        ]
        if steps is None:
            strategy.run(step, args=batch)
        else:
            strategy.executor.compiler.scan(strategy, step, [batch] * steps)
        return backend.compiled_programs()


def described(layout, shape, dtype):
    """A global batch, of which each replica has as many rows."""
    count = layout.num_replicas
    if count == 1:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding)
    array = jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharded)
    return JoinedPerReplica(array, False, layout)


def is_as_keras_traces_it(target):
    """Whether a step of `fit` is what JAX lowers Keras' own step to."""
    with get_backend().on_target(target) as workers:
        kind = "multi-worker" if len(workers) > 1 else "mirrored"
        strategy = strategy_of(choice_on(target, workers, kind, None), target)
        rows = ROWS * strategy.num_replicas_in_sync
        layout = strategy.executor.layout
        with without_values(), strategy.scope():
            made = model()
            batch = (
                keras.KerasTensor((rows, WIDTH)),
                keras.KerasTensor((rows,), "int32"),
            )
            made._symbolic_build(data_batch=batch)
            strategy.executor.trace_step(made, batch)
            (noted,) = current_machine().noted
            *state, batch = noted.groups.values()
            step = jax.jit(
                stateless(made, "train_step"),
                donate_argnums=0,
                in_shardings=(layout.replicated, layout.sharded),
                out_shardings=(
                    layout.replicated if layout.is_global else None,
                    layout.replicated,
                ),
            )
            expected = step.trace(state, batch).lower().as_text()
            found = noted.traced.lower().as_text()
            current_machine().noted.clear()
    return found == expected


def main(name):
    """Prints the programs of one target."""
    target = read_target(name)
    is_own = is_as_keras_traces_it(target)
    with get_backend().on_target(target) as workers:
        count = sum(workers)
    known = ON_HOSTS if len(workers) > 1 else ON_ONE_HOST
    found = {}
    for kind, (strategy, split) in known.items():
        choice = target, strategy, split
        rows = ROWS * (1 if kind == "one device" else count)
        found[kind] = {
            "fit": of_fit(*choice, rows),
            "function": of_function(*choice, rows),
        }
        if kind == "mirrored":
            found[kind] |= {
                "uneven fit": of_fit(*choice, rows - 3),
                "scan": of_function(*choice, rows, steps=STEPS),
            }
        keras.utils.clear_session()
    if name == "h100:8":
        choice = target, *known["sharded variables"], 64 * count
        found["recurrent"] = {"fit": of_fit(*choice, make=recurrent)}
        for kind in ("mirrored", "sharded variables"):
            choice = target, *known[kind], 64 * count
            found[f"blocks, {kind}"] = {
                "fit": of_fit(*choice, make=blocks),
                "function": of_function(*choice, make=block_layers),
            }
    if target.kind.platform == "tpu" and len(workers) == 1:
        choice = target, "mirrored"
        rows = ROWS * count
        found["with a kernel"] = {
            "function": of_function(*choice, None, rows, make=attentive)
        }
        if count == 4:
            found["wide, sharded variables"] = {
                "fit": of_fit(*choice, "variables", 8 * rows, make=wide)
            }
    programs = {
        kind: {
            way: [*map(dataclasses.asdict, made)] for way, made in each.items()
        }
        for kind, each in found.items()
    }
    print(
        json.dumps(
            {"devices": count, "programs": programs, "is_own": is_own},
        )
    )


if __name__ == "__main__":
    for each in sys.argv[1:]:
        main(each)
