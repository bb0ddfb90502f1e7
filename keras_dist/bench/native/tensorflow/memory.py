"""The memory count of `keras-dist bench memory` on TensorFlow."""

import gc

import tensorflow as tf

from keras_dist.core.device import Device
from keras_dist.core.device import parse_device

TEXT = (
    "Measured: every live `tf.Variable` of the process and every eager tensor."
)


def live_bytes() -> dict[Device, int]:
    """Counts the bytes of live variables and eager tensors on each device."""
    totals: dict[Device, int] = {}
    seen = set()
    for each in gc.get_objects():
        # Not `isinstance`, which makes lazy modules load themselves.
        kind = type(each)
        if issubclass(kind, tf.Variable):
            if issubclass(kind, tf.distribute.DistributedValues):
                continue  # its components are variables too
            each, tensor = each, each.handle
        elif issubclass(kind, tf.Tensor):
            tensor = each
        else:
            continue
        if tf.is_symbolic_tensor(tensor) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if each.dtype.size and each.dtype not in (tf.resource, tf.variant):
            name = parse_device(each.device)
            num_bytes = each.shape.num_elements() * each.dtype.size
            totals[name] = totals.get(name, 0) + num_bytes
    return totals
