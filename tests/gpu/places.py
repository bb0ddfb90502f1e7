"""The devices that the checks use: GPUs, or CPU devices in a rehearsal.

A rehearsal runs all of the checks' code on a machine without a GPU. What only
a GPU can show is then left out by name.
"""

import functools
import os

from xla_flags import xla_flags

IS_REHEARSAL = os.environ.get("GPU_REHEARSAL") == "1"
KIND = "cpu" if IS_REHEARSAL else "gpu"
DEVICE = f"{KIND}:0"
# Where central storage keeps variables. In a rehearsal it is a virtual device
# that computes nothing.
HOST = "cpu:3" if IS_REHEARSAL else "cpu:0"
VIRTUAL_DEVICES = 4


def set_environment():
    """Sets what frameworks read when they start; call it before they do."""
    if IS_REHEARSAL:
        os.environ.setdefault(
            "KERAS_DIST_VIRTUAL_DEVICES", str(VIRTUAL_DEVICES)
        )
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
        # Most of the time of a rehearsal is XLA compiling small programs.
        os.environ.setdefault("XLA_FLAGS", xla_flags())
    # Memory as it is used, so that processes can share a GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Numbers are compared in true float32.
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")


# Benchmarks compute as users' programs do.
FOR_NUMBERS_ONLY = ("NVIDIA_TF32_OVERRIDE", "JAX_DEFAULT_MATMUL_PRECISION")


@functools.cache
def num_devices():
    """Returns the number of GPUs, or of CPU devices that stand in for them."""
    import keras_dist

    if IS_REHEARSAL:
        return VIRTUAL_DEVICES - 1
    return len(keras_dist.list_devices("gpu"))


def devices(count):
    """Returns the names of the first GPUs."""
    return [f"{KIND}:{index}" for index in range(count)]


def lack(count):
    """Returns a sentence that says which GPUs are missing, `""` if none."""
    if num_devices() >= count:
        return ""
    wanted = "an NVIDIA GPU" if count == 1 else f"{count} NVIDIA GPUs"
    return (
        f"This check needs {wanted} that the framework can use; "
        f"it sees {num_devices() or 'none'}."
    )
