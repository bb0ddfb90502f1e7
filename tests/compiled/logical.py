"""Compiles steps of replicas with four logical devices; prints what is in them.

Takes names of targets, and prints a line of JSON for each.
"""

import dataclasses
import json
import os
import sys

# The tests' flags would change what the compilers do.
os.environ.pop("XLA_FLAGS", None)
os.environ["JAX_PLATFORMS"] = "cpu"

import keras
from keras import layers

import keras_dist
from compiled.programs import described
from keras_dist.cli.jobs.plan import without_values
from keras_dist.planning.targets import read_target
from keras_dist.plugin.backend import get_backend
from steps import classifier_step

ROWS, WIDTH, HIDDEN, CLASSES, LOGICAL = 64, 256, 1024, 16, 4
LAYOUTS = {
    r".*up/kernel": (None, "logical"),
    r".*up/bias": ("logical",),
    r".*down/kernel": ("logical", None),
}
OF_ATTENTION = {
    r".*/(query|key|value)/kernel": (None, "logical"),
    r".*/attention_output/kernel": ("logical",),
}


def classifier(inputs, x):
    """A compiled model with one more layer."""
    made = keras.Model(inputs, layers.Dense(CLASSES)(x))
    made.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return made


def attention():
    """A layer of attention between two others, for which TPUs have a kernel."""
    inputs = keras.Input((128, WIDTH))
    x = layers.Dense(WIDTH, use_bias=False, name="first")(inputs)
    x = layers.MultiHeadAttention(4, 128, use_bias=False)(x, x)
    return classifier(inputs, layers.GlobalAveragePooling1D()(x))


def pair():
    """A pair of layers between two others."""
    inputs = keras.Input((WIDTH,))
    x = layers.Dense(WIDTH, use_bias=False, name="first")(inputs)
    x = layers.Dense(HIDDEN, activation="relu", name="up")(x)
    x = layers.Dense(WIDTH, use_bias=False, name="down")(x)
    return classifier(inputs, x)


def of_function(backend, strategy, model, optimizer):
    """The program of a function that trains the model."""

    step = keras_dist.function(classifier_step(model, optimizer))
    layout = strategy.executor.layout
    batch = [
        described(layout, (ROWS, *model.input_shape[1:]), "float32"),
        described(layout, (ROWS,), "int32"),
    ]
    strategy.run(step, args=batch)
    return backend.compiled_programs()


def both(backend, make, layout_map):
    """The programs of a step of `fit`, and of a function."""
    strategy = keras_dist.MirroredStrategy(
        logical_devices=LOGICAL, layout_map=layout_map
    )
    with without_values(), strategy.scope():
        model = make()
        batch = (
            keras.KerasTensor((ROWS, *model.input_shape[1:])),
            keras.KerasTensor((ROWS,), "int32"),
        )
        model._symbolic_build(data_batch=batch)
        fit = backend.compiled_step(strategy.executor, model, batch)
    with without_values(), strategy.scope():
        model, optimizer = make(), keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    function = of_function(backend, strategy, model, optimizer)
    return {"fit": fit, "function": function}


def main(name):
    """Prints the programs of one target."""
    backend = get_backend()
    with backend.on_target(read_target(name)):
        programs = {
            "pair": both(backend, pair, LAYOUTS),
            "attention": both(backend, attention, OF_ATTENTION),
        }
    found = {
        kind: {way: dataclasses.asdict(made[0]) for way, made in each.items()}
        for kind, each in programs.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    for each in sys.argv[1:]:
        main(each)
