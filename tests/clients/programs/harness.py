"""Trains a program on one device and under a strategy, and compares.

A program is a module with `make()`, which returns a compiled model and the
arguments of `fit` as a dict, in the way of an author who has one device.
Nothing in it knows of keras_dist. A program may say of itself:

- `FIT`: Dict, further arguments of `fit`.
- `SHOWS`: Tuple of the methods to compare after `fit`, of `"evaluate"` and
  `"predict"`. By default, the first.
- `TOLERANCE`: Float, the largest difference, of an array's largest entry.
- `train(model, data)`: Callable that trains instead of `fit`, and returns a
  dict of logs.
- `REFUSED`: Dict from a backend to a pattern of the error's message, where
  replicas can't give the numbers of one device.
- `TOLD`: Dict from a backend to a pattern of the warning, where they differ.
- `repaired()`: Callable like `make()`, for a program in which those lines are
  changed that give it the numbers of one device.
"""

import contextlib
import functools
import re

import keras
import numpy as np
import pytest

import keras_dist
from parity.harness import BACKEND
from parity.harness import PLAIN_ONLY
from parity.harness import assert_same
from parity.harness import flat
from parity.harness import strategy
from parity.harness import to_numpy

# Batches of 9 and of 7 rows, which 2 and 3 replicas divide unevenly. No replica
# has a single row: Keras on PyTorch can't differentiate a small Conv2D then.
ROWS, BATCH_SIZE = 16, 9


def outcome(program, context, make):
    """Trains a program, and returns all that it leaves as a dict of arrays.

    Args:
        program: A module with `make()`.
        context: Callable that returns the scope to make the model in.
        make: Callable that makes the model and its data.
    """
    keras.utils.set_random_seed(7)
    with context():
        model, data = make()
    if BACKEND == "tensorflow":
        model.jit_compile = False  # Compiling with XLA takes most of the time.
    owned = _optimizers(model)
    for optimizer in owned:
        # Where gradients are 0 but for rounding, Adam would show rounding.
        if getattr(optimizer, "epsilon", None) is not None:
            optimizer.epsilon = 1e-2
    logs = _train(program, model, data)
    shown = {
        name: getattr(model, name)(**_arguments(name, data), verbose=0)
        for name in getattr(program, "SHOWS", ("evaluate",))
    }
    return (
        flat("logs", logs)
        | flat("shown", shown)
        | {
            f"{index}/{_plain_path(v)}": to_numpy(v)
            for index, v in enumerate(
                [*model.weights, *(v for o in owned for v in o.variables)]
            )
            if not _counts_steps(v)
        }
    )


def assert_same_as_one_device(program, num_replicas):
    """Asserts that replicas give one device's numbers, or an error."""
    refused = getattr(program, "REFUSED", {}).get(BACKEND)
    told = getattr(program, "TOLD", {}).get(BACKEND)
    make = program.make
    if not PLAIN_ONLY and (refused or told):
        expected = pytest.raises(Exception, match=f"(?s){refused}")
        if told:
            expected = pytest.warns(
                keras_dist.ReplicaCodeWarning, match=f"(?s){told}"
            )
        with expected:
            outcome(program, _scope(num_replicas), make)
        make = getattr(program, "repaired", None)
    if make is not None:
        theirs = _one_device(program)
        ours = outcome(program, _scope(num_replicas), make)
        assert_same(ours, theirs, getattr(program, "TOLERANCE", 2e-5))


@functools.cache
def _one_device(program):
    """What plain Keras gives.

    On JAX it has no steps that are written with variables; there, a strategy
    of one device stands in.
    """
    if BACKEND == "jax" and hasattr(program, "train_step_of"):
        one = keras_dist.OneDeviceStrategy("cpu:0").scope
        return outcome(program, one, program.make)
    return outcome(program, contextlib.nullcontext, program.make)


def _scope(num_replicas):
    return (
        contextlib.nullcontext if PLAIN_ONLY else strategy(num_replicas).scope
    )


def _train(program, model, data):
    if hasattr(program, "train"):
        return program.train(model, data)
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    if not isinstance(data["x"], keras.utils.PyDataset):
        options["batch_size"] = BATCH_SIZE
    options |= getattr(program, "FIT", {})
    return model.fit(**data, **options).history


def _arguments(name, data):
    if isinstance(data["x"], keras.utils.PyDataset):
        return {"x": data["x"]}
    kept = {"x": data["x"], "batch_size": BATCH_SIZE}
    if name == "evaluate":
        kept |= {key: data[key] for key in ("y",) if key in data}
    return kept


def _optimizers(model):
    """The optimizers of a model, also those that Keras does not know."""
    found = [
        value
        for value in vars(model).values()
        if isinstance(value, keras.optimizers.Optimizer)
    ]
    found += [o.inner_optimizer for o in found if hasattr(o, "inner_optimizer")]
    return list({id(optimizer): optimizer for optimizer in found}.values())


def _plain_path(variable):
    """A variable's path without the numbers that make names unique."""
    return re.sub(r"_\d+", "", variable.path)


def _counts_steps(variable):
    """The optimizer's count of steps, where plain Keras adds too many.

    Where it does not know how long data is, TensorFlow's graph counts the
    step that finds no more of it.
    """
    return BACKEND == "tensorflow" and variable.path.endswith("iteration")


def rng():
    """The source of all data: the same for every program."""
    return np.random.default_rng(5)
