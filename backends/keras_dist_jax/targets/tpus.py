"""The TPUs that JAX sees: places of their cores in the mesh."""

import jax

from keras_dist_jax.machine import current_machine
from keras_dist_jax.machine import devices_by_worker
from keras_dist_jax.placement.layout import jax_devices


def tpu_places() -> list[list[tuple[int, ...]]]:
    """Implements `HasTPUs.tpu_places`."""
    if all(device.type != "tpu" for device in jax_devices()):
        return []
    # A target's hosts are known.
    count = 0 if current_machine() is not None else _num_hosts()
    return [
        [
            (*device.coords, device.core_on_chip)
            for device in sorted(devices, key=lambda device: device.id)
        ]
        for devices in devices_by_worker("tpu", count)
    ]


def _num_hosts() -> int:
    """Returns the number of hosts with cores, workers or not."""
    indices: list[int] = [device.process_index for device in jax.devices("tpu")]
    return 1 + max(indices)
