"""JAX's devices by the names that people give them."""

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
    """This worker's `jax.Device`s by name, the default platform's first."""
    found = list(jax.local_devices())
    if found[0].platform != "cpu":
        # A process may have been told to use accelerators only.
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
