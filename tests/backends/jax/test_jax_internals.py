"""JAX's private functions take what the public ones take."""

import jax
import numpy as np

from keras_dist_jax.jax_internals import from_shards


def test_shards_may_be_slices_of_an_array_on_several_devices():
    devices = jax.devices()[:2]
    mesh = jax.sharding.Mesh(devices, "replica")
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    cut = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec("replica")
    )
    rows = np.arange(8, dtype="float32")
    array = jax.device_put(rows, whole)
    aval = jax.core.ShapedArray((8,), array.dtype)
    made = from_shards(aval, cut, [array[:4], array[4:]], devices)
    np.testing.assert_array_equal(np.asarray(made), rows)
    for shard, device in zip(made.addressable_shards, devices, strict=True):
        assert shard.device == device
