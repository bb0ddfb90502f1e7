"""What the examples of the reference pages are checked with."""

import itertools

import keras

import keras_dist
from conformance.helpers import local

BACKEND = keras.backend.backend()
DEVICES = ["cpu:0", "cpu:1"]
# Virtual devices of PyTorch share the one that it knows.
PLACES = ["cpu:0", "cpu:0"] if BACKEND == "torch" else DEVICES

# Examples that are not run: those of `experimental_*_logical_device(s)` on the
# pages of Strategy, CentralStorageStrategy and TPUStrategy, which have so many
# cores a replica along each side. They run with one logical device each, and on
# JAX, tests of its own run with several.
NOT_RUN = [(1, 1, 1, 2), (1, 2, 2, 2)]


def framed(kind, components):
    """How a distributed value prints on the pages."""
    lines = ",\n".join(f"  {i}: {x!r}" for i, x in enumerate(components))
    return f"{kind}:{{\n{lines}\n}}"


def shown(value):
    """A value's components as numbers; checks that it prints as on the pages.

    A value that is one for all replicas has no frame.
    """
    if hasattr(value, "values") and not keras.ops.is_tensor(value):
        is_ours = isinstance(value, keras_dist.PerReplica)
        kind = "PerReplica" if is_ours else type(value).__name__
        assert repr(value) == framed(kind, value.values)
    return [part.tolist() for part in local(value)]


def places(tensor):
    """Where a tensor is, as the pages ask with `.device`.

    On JAX it may be on several devices.
    """
    if BACKEND == "jax":
        return [f"{device.platform}:{device.id}" for device in tensor.devices()]
    if BACKEND == "torch":
        return [f"{tensor.device.type}:{tensor.device.index or 0}"]
    return [tensor.device.rsplit("device:", 1)[-1].lower()]


class Range:
    """Integers from 0 in batches, as `range(stop).batch(size)` on the pages."""

    def __init__(self, stop, size):
        self._stop, self._size = stop, size

    def __iter__(self):
        for start in range(0, self._stop, self._size):
            stop = min(start + self._size, self._stop)
            yield keras.ops.convert_to_numpy(
                keras.ops.arange(start, stop, dtype="int32")
            )


def ones_for_ever(context, global_batch_size):
    """This pipeline's share of `[[1.0]]` in batches that never end."""
    size = context.get_per_replica_batch_size(global_batch_size)
    batches = itertools.repeat(
        keras.ops.convert_to_numpy(keras.ops.ones((size, 1, 1)))
    )
    return itertools.islice(
        batches, context.input_pipeline_id, None, context.num_input_pipelines
    )
