"""Bytes that devices hold, as the framework's allocator counts them.

A rehearsal counts live tensors in place of that, as `python -m bench memory`
does, and can't tell what was held during a step.
"""

import gc

import keras

from bench.native import native
from gpu import places
from keras_dist.core.device import parse_device

BACKEND = keras.backend.backend()


def held(model, device=places.DEVICE):
    """Returns the bytes that a device holds now.

    Args:
        model: The `keras.Model` whose variables tell, in a rehearsal, which of
            PyTorch's tensors are on which virtual device.
        device: String, the device's name.
    """
    gc.collect()
    if places.IS_REHEARSAL:
        return native().live_bytes(model).get(parse_device(device), 0)
    return _of_gpu(device, "current")


def peak(device=places.DEVICE):
    """Returns the most bytes that a GPU held since `reset_peak`."""
    return _of_gpu(device, "peak")


def reset_peak(device=places.DEVICE):
    """Forgets what a GPU held before; JAX can't, so start a new process."""
    if places.IS_REHEARSAL:
        return
    if BACKEND == "torch":
        import torch

        torch.cuda.reset_peak_memory_stats(parse_device(device).index)
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        tf.config.experimental.reset_memory_stats(_name(device))


def total(device=places.DEVICE):
    """Returns the bytes that a GPU has for this process, about."""
    if BACKEND == "torch":
        import torch

        index = parse_device(device).index
        return torch.cuda.get_device_properties(index).total_memory
    if BACKEND == "jax":
        return _jax_stats(device)["bytes_limit"]
    return _listed_by_driver()


def _of_gpu(device, what):
    if BACKEND == "torch":
        import torch

        index = parse_device(device).index
        torch.cuda.synchronize(index)
        count = {
            "current": torch.cuda.memory_allocated,
            "peak": torch.cuda.max_memory_allocated,
        }
        return count[what](index)
    if BACKEND == "jax":
        names = {"current": "bytes_in_use", "peak": "peak_bytes_in_use"}
        return _jax_stats(device)[names[what]]
    import tensorflow as tf

    return tf.config.experimental.get_memory_info(_name(device))[what]


def _jax_stats(device):
    import jax

    return jax.local_devices(backend="gpu")[
        parse_device(device).index
    ].memory_stats()


def _name(device):
    return device.upper()


def _listed_by_driver():
    from gpu import machine

    return machine.gpus()[0]["bytes"]
