"""Training with each framework's own means; one module for each.

Each module has texts, which describe for people what it measures, and:

- `native_loop(setting)`, a loop as the framework's users write it by hand;
- `other_loops(setting)`, further loops by name, which help to find the cause
  of a difference;
- `native_fits(task, devices, stack)`, functions that make the framework's own
  loops on NumPy arrays, by name; `stack` closes what they start;
- `live_bytes(model)`, the bytes that this process holds on each device,
  whoever holds them;
- `NativeWorkers(workers)`, the framework's own distribution over workers that
  have joined each other. Its method `loop` takes a worker's rows of each
  batch, and `collectives` counts those of an arm's steps.

The optimizer is Keras' default Adam with `LEARNING_RATE`, the loss the mean
over rows of the cross entropy of softmax.
"""

import importlib

import keras


def native():
    """Returns the module of the Keras backend in use."""
    return importlib.import_module(f"{__name__}.{keras.backend.backend()}")
