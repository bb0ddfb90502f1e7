"""What the tests of gradients share."""

import keras
import numpy as np

import keras_dist

BACKEND = keras.backend.backend()


def strategy_of(num_replicas):
    """A strategy of so many replicas, on CPUs; of one, `OneDeviceStrategy`."""
    if num_replicas == 1:
        return keras_dist.OneDeviceStrategy("cpu:0")
    return keras_dist.MirroredStrategy(
        [f"cpu:{index}" for index in range(num_replicas)]
    )


def array(value):
    """A tensor, variable or number as an array."""
    if isinstance(value, keras.Variable):
        value = value.value
    return np.asarray(keras.ops.convert_to_numpy(value))


def local(value):
    """Each replica's component of one leaf, as arrays."""
    is_many = isinstance(value, keras_dist.DistributedValues)
    return [array(part) for part in (value.values if is_many else [value])]


def cut(rows, num_replicas):
    """An array's rows, in shares; as `run` takes them."""
    shares = np.array_split(rows, num_replicas)
    return keras_dist.PerReplica(shares) if num_replicas > 1 else rows


def total(strategy, value):
    """The sum over replicas of a scalar, as a float."""
    return float(array(strategy.reduce("SUM", value, axis=None)))


def weights_after_fit(make, num_replicas=2):
    """What a model with a `train_step` of its own learns, as one vector."""
    keras.utils.set_random_seed(3)
    with strategy_of(num_replicas).scope():
        inputs = keras.Input((3,))
        model = make(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse", jit_compile=False)
    x = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
    model.fit(x, x[:, :1], batch_size=7, epochs=4, shuffle=False, verbose=0)
    return np.concatenate([w.ravel() for w in model.get_weights()])
