"""JAX's devices by the names of keras_dist, such as `gpu:0`."""

import collections
import contextlib
from typing import Any

import jax

from keras_dist.core.device import Device

_TYPES = {
    "cpu": "cpu",
    "gpu": "gpu",
    "cuda": "gpu",
    "rocm": "gpu",
    "tpu": "tpu",
}


def jax_devices() -> dict[Device, Any]:
    """Returns this worker's `jax.Device`s, the default platform's first."""
    found = list(jax.local_devices())
    if found[0].platform != "cpu":
        # JAX_PLATFORMS may exclude the CPU.
        with contextlib.suppress(RuntimeError):
            found += jax.local_devices(backend="cpu")
    seen: collections.Counter[str] = collections.Counter()
    devices = {}
    for device in found:
        type_ = _TYPES.get(device.platform)
        if type_ is not None:
            devices[Device(type_, seen[type_])] = device
            seen[type_] += 1
    return devices
