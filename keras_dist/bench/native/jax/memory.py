"""Measured memory on JAX for `keras-dist bench memory`."""

import jax

from keras_dist.core.device import Device
from keras_dist_jax.devices import jax_devices

TEXT = "Measured: every live `jax.Array` of the process, each buffer once."


def live_bytes() -> dict[Device, int]:
    """Returns the bytes of live buffers on each device."""
    names = {device: name for name, device in jax_devices().items()}
    buffers = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            data = shard.data
            key = names[shard.device], data.unsafe_buffer_pointer()
            buffers[key] = data.nbytes
    totals: dict[Device, int] = {}
    for (name, _), num_bytes in buffers.items():
        totals[name] = totals.get(name, 0) + num_bytes
    return totals
