"""Reference loops on JAX for `keras-dist bench loops`."""

import functools
import itertools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from jax.sharding import SingleDeviceSharding

from keras_dist.bench.loops import BETA_1
from keras_dist.bench.loops import BETA_2
from keras_dist.bench.loops import EPSILON
from keras_dist.bench.loops import LEARNING_RATE
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.portable import build_model
from keras_dist.core.device import parse_device
from keras_dist_jax.layout import jax_devices

_Step = Callable[[Any, Any, Any], tuple[Any, Any]]


class JittedLoop(Loop):
    """A loop that carries a state through a jitted step.

    `step` takes the state, a nest of arrays, and a batch, and returns the new
    state and the loss. With `by_hand`, each device runs the step on its own
    rows, by `jax.shard_map`.
    """

    def __init__(
        self, setting: Setting, state: Any, step: _Step, by_hand: bool = False
    ) -> None:
        everywhere, by_rows = shardings(setting.devices)
        if by_hand:
            step = jax.shard_map(
                step,
                mesh=by_rows.mesh,
                in_specs=(everywhere.spec, by_rows.spec, by_rows.spec),
                out_specs=(everywhere.spec, everywhere.spec),
                check_vma=False,
            )
        # On CPUs, programs with collectives that are queued behind one another
        # can deadlock, after which the runtime aborts the process.
        self._waits = setting.num_replicas > 1 and on_cpu(setting.devices)
        self._batches = jax.device_put(setting.batches(), by_rows)
        # Only memory that JAX allocated can be donated.
        copy = jax.jit(
            functools.partial(jax.tree.map, jnp.copy), out_shardings=everywhere
        )
        self._state = copy(jax.device_put(state, everywhere))
        self._step = jax.jit(
            step, donate_argnums=0, out_shardings=(everywhere, everywhere)
        )

    def run(self, steps: int) -> float:
        step, state, waits = self._step, self._state, self._waits
        loss = None
        for x, y in itertools.islice(itertools.cycle(self._batches), steps):
            if waits and loss is not None:
                loss.block_until_ready()
            state, loss = step(state, x, y)
        self._state = state
        return float(loss)  # type: ignore[arg-type]


def on_cpu(devices: Sequence[str]) -> bool:
    """Tells whether devices are CPUs, on which steps wait for one another."""
    return devices[0].startswith("cpu")


def shardings(names: Sequence[str]) -> tuple[Any, Any]:
    """Returns the shardings of the state, replicated, and of batches."""
    known = jax_devices()
    devices = [known[parse_device(name)] for name in names]
    if len(devices) == 1:
        only = SingleDeviceSharding(devices[0])
        return only, only
    mesh = Mesh(np.array(devices), ("replica",))
    return (
        NamedSharding(mesh, PartitionSpec()),
        NamedSharding(mesh, PartitionSpec("replica")),
    )


def native_state(setting: Setting) -> Any:
    """Returns weights, and the slots and the count of Adam."""
    weights = setting.weights()
    zeros = [np.zeros_like(each) for each in weights]
    return weights, zeros, zeros, np.int32(0)


def native_step(state: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Trains on a batch, without Keras."""
    loss, gradients = jax.value_and_grad(_loss)(state[0], x, y)
    return _updated(state, gradients), loss


def replica_step(state: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Trains on a device's rows of a batch, in `jax.shard_map`."""
    mine = jax.value_and_grad(_loss)(state[0], x, y)
    loss, gradients = jax.lax.pmean(mine, "replica")
    return _updated(state, gradients), loss


def _updated(state: Any, gradients: Any) -> Any:
    """Applies one step of Adam."""
    weights, means, variances, count = state
    count = count + 1
    rate = (
        LEARNING_RATE * jnp.sqrt(1 - BETA_2**count) / (1 - BETA_1**count)
    ).astype("float32")
    means = [
        m + (g - m) * (1 - BETA_1)
        for m, g in zip(means, gradients, strict=True)
    ]
    variances = [
        v + (g * g - v) * (1 - BETA_2)
        for v, g in zip(variances, gradients, strict=True)
    ]
    weights = [
        w - rate * m / (jnp.sqrt(v) + EPSILON)
        for w, m, v in zip(weights, means, variances, strict=True)
    ]
    return weights, means, variances, count


def _loss(weights: Any, x: Any, y: Any) -> Any:
    *hidden, kernel, bias = weights
    for i in range(0, len(hidden), 2):
        x = jax.nn.relu(x @ hidden[i] + hidden[i + 1])
    log_probabilities = jax.nn.log_softmax(x @ kernel + bias)
    return -jnp.mean(jnp.take_along_axis(log_probabilities, y[:, None], 1))


def stateless(setting: Setting) -> tuple[Any, _Step]:
    """Returns a Keras model's state, a nest of NumPy arrays, and its step."""
    model = build_model(setting)
    optimizer = keras.optimizers.Adam(LEARNING_RATE)
    optimizer.build(model.trainable_variables)

    def loss_fn(trainable: Any, fixed: Any, x: Any, y: Any) -> Any:
        logits, fixed = model.stateless_call(trainable, fixed, x, training=True)
        losses = keras.losses.sparse_categorical_crossentropy(
            y, logits, from_logits=True
        )
        return jnp.mean(losses), fixed

    def step(state: Any, x: Any, y: Any) -> tuple[Any, Any]:
        trainable, fixed, slots = state
        (loss, fixed), gradients = jax.value_and_grad(loss_fn, has_aux=True)(
            trainable, fixed, x, y
        )
        trainable, slots = optimizer.stateless_apply(
            slots, gradients, trainable
        )
        return (trainable, fixed, slots), loss

    state = (
        [np.asarray(v) for v in model.trainable_variables],
        [np.asarray(v) for v in model.non_trainable_variables],
        [np.asarray(v) for v in optimizer.variables],
    )
    return state, step
