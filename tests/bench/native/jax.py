"""Training with JAX: `jax.jit`, and `keras.distribution`."""

import functools
import pathlib
import tempfile

import jax
import keras
import numpy as np
from jax import numpy as jnp
from jax.profiler import ProfileData
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from jax.sharding import SingleDeviceSharding
from packaging.version import Version

from bench import settings
from keras_dist.bench.fit import FitArm
from keras_dist.core.device import parse_device
from keras_dist_jax.placement.layout import jax_devices

LOOP_TEXT = (
    "jax.jit with donated state, written by hand without Keras; several "
    "devices use NamedSharding, and CPUs wait for one step to end before "
    "the next. Shmap: jax.shard_map in its place."
)
FITS_TEXT = (
    "DataParallel is `fit` under keras.distribution.DataParallel; jit is "
    "the model's own `train_step` in jax.jit, in a loop written by hand "
    "that puts each batch on the devices with NamedSharding; CPUs wait "
    "for one step to end before the next."
)
LIVE_BYTES_TEXT = (
    "Measured: every live `jax.Array` of the process, each buffer once."
)

# The names of the compiler's operations.
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")

# Under a distribution, Keras 3.14's `train_on_batch` fails without weights.
_NEEDS_NO_WEIGHTS = Version("3.15.0.dev0")

# Defaults of Keras' Adam.
_BETA_1, _BETA_2 = 0.9, 0.999


class JittedLoop(settings.StepLoop):
    """A loop that carries a nest of arrays through a jitted step."""

    def __init__(self, state, step, everywhere, batches=(), place=None):
        jitted = jax.jit(
            step, donate_argnums=0, out_shardings=(everywhere, everywhere)
        )
        super().__init__(jitted, batches, place)
        self._to_devices = jax.jit(
            # Only memory that JAX allocated can be donated.
            functools.partial(jax.tree.map, jnp.copy),
            out_shardings=everywhere,
        )
        self._state = self._to_devices(state)
        # On CPUs, programs with collectives that are queued behind one another
        # can deadlock, after which the runtime aborts the process.
        devices = list(everywhere.device_set)
        self._waits = len(devices) > 1 and devices[0].platform == "cpu"

    def __call__(self, steps):
        step, state, waits = self.step, self._state, self._waits
        loss = None
        for x, y in self.feed(steps):
            if waits and loss is not None:
                loss.block_until_ready()
            state, loss = step(state, x, y)
        self._state = state
        return float(loss)


def placed_loop(setting, state, step, by_hand=False):
    """Returns a jitted loop on batches that are on the devices beforehand."""
    everywhere, by_rows = shardings(devices_of(setting.devices))
    if by_hand:
        # Each device runs the step on its own rows.
        step = jax.shard_map(
            step,
            mesh=by_rows.mesh,
            in_specs=(everywhere.spec, by_rows.spec, by_rows.spec),
            out_specs=(everywhere.spec, everywhere.spec),
            check_vma=False,
        )
    batches = jax.device_put(setting.batches(), by_rows)
    return JittedLoop(state, step, everywhere, batches)


class JittedModelLoop(JittedLoop):
    """A jitted loop of a compiled model's stateless `train_step`."""

    def __init__(self, task, devices):
        self._task = task
        everywhere, self._by_rows = shardings(devices_of(devices))
        model = task.model()
        # Builds metrics, and leaves weights alone.
        model.test_on_batch(*task.data(1))
        model.reset_metrics()
        model.optimizer.build(model.trainable_variables)

        def step(state, x, y):
            logs, state = model.train_step(state, (x, y))
            return state, logs["loss"]

        super().__init__(values_of(model, model.optimizer), step, everywhere)
        self._metrics = [np.asarray(each) for each in model.metrics_variables]

    def feed(self, steps):
        for batch in settings.batches_of(self._task, steps):
            yield jax.device_put(batch, self._by_rows)

    def __call__(self, steps):
        self._state = (*self._state[:3], self._to_devices(self._metrics))
        return super().__call__(steps)


def devices_of(names):
    known = jax_devices()
    return [known[parse_device(name)] for name in names]


def shardings(devices):
    """Returns the shardings of the state, replicated, and of batches."""
    if len(devices) == 1:
        only = SingleDeviceSharding(devices[0])
        return only, only
    mesh = Mesh(np.array(devices), ("replica",))
    return (
        NamedSharding(mesh, PartitionSpec()),
        NamedSharding(mesh, PartitionSpec("replica")),
    )


def values_of(model, optimizer):
    """Returns the state that Keras' stateless methods take, in host memory."""
    return tuple(
        [np.asarray(each) for each in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    )


def native_state(setting):
    """Returns weights, and the slots and the count of Adam."""
    weights = setting.weights()
    zeros = [np.zeros_like(each) for each in weights]
    return weights, zeros, zeros, np.int32(0)


def native_step(state, x, y):
    """Trains on a batch, without Keras."""
    loss, gradients = jax.value_and_grad(_loss)(state[0], x, y)
    return _updated(state, gradients), loss


def replica_step(state, x, y):
    """Trains on a device's rows of a batch, in `jax.shard_map`."""
    mine = jax.value_and_grad(_loss)(state[0], x, y)
    loss, gradients = jax.lax.pmean(mine, "replica")
    return _updated(state, gradients), loss


def _updated(state, gradients):
    """Applies one step of Adam."""
    weights, means, variances, count = state
    count = count + 1
    rate = (
        settings.LEARNING_RATE
        * jnp.sqrt(1 - _BETA_2**count)
        / (1 - _BETA_1**count)
    ).astype("float32")

    def one(weight, mean, variance, gradient):
        mean += (gradient - mean) * (1 - _BETA_1)
        variance += (gradient * gradient - variance) * (1 - _BETA_2)
        weight -= rate * mean / (jnp.sqrt(variance) + settings.EPSILON)
        return weight, mean, variance

    lists = map(one, weights, means, variances, gradients)
    return *map(list, zip(*lists, strict=True)), count


def _loss(weights, x, y):
    *hidden, kernel, bias = weights
    for i in range(0, len(hidden), 2):
        x = jax.nn.relu(x @ hidden[i] + hidden[i + 1])
    log_probabilities = jax.nn.log_softmax(x @ kernel + bias)
    return -jnp.mean(jnp.take_along_axis(log_probabilities, y[:, None], 1))


def stateless(setting):
    """Returns a Keras model's state, a nest of NumPy arrays, and its step."""
    model, optimizer = setting.model_and_optimizer()

    def loss_fn(trainable, fixed, x, y):
        logits, fixed = model.stateless_call(trainable, fixed, x, training=True)
        return jnp.mean(settings.row_losses(y, logits)), fixed

    def step(state, x, y):
        trainable, fixed, slots = state
        (loss, fixed), gradients = jax.value_and_grad(loss_fn, has_aux=True)(
            trainable, fixed, x, y
        )
        trainable, slots = optimizer.stateless_apply(
            slots, gradients, trainable
        )
        return (trainable, fixed, slots), loss

    return values_of(model, optimizer), step


def native_loop(setting):
    return placed_loop(setting, native_state(setting), native_step)


def other_loops(setting):
    found = {"Keras": placed_loop(setting, *stateless(setting))}
    if setting.num_replicas > 1:
        found["shmap"] = placed_loop(
            setting, native_state(setting), replica_step, by_hand=True
        )
    return found


def native_fits(task, devices, stack):
    distribution = keras.distribution.DataParallel(
        devices=list(devices), auto_shard_dataset=False
    )
    scope = distribution.scope
    return {
        "DataParallel": lambda: FitArm(task, scope, scope),
        "jit": lambda: JittedModelLoop(task, devices),
    }


def live_bytes(model):
    names = {device: name for name, device in jax_devices().items()}
    buffers = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            data = shard.data
            key = names[shard.device], data.unsafe_buffer_pointer()
            buffers[key] = data.nbytes
    totals = {}
    for (name, _), num_bytes in buffers.items():
        totals[name] = totals.get(name, 0) + num_bytes
    return totals


class NativeWorkers:
    """`keras.distribution.DataParallel` over all workers' devices."""

    text = (
        "`train_on_batch` under keras.distribution.DataParallel over the "
        "devices of all processes; each takes its rows of NumPy batches. "
        "From Keras 3.15, it resets metrics before each step, and workers "
        "wait for each other to do so. Keras 3.14 gets sample weights of 1, "
        "because it fails without them. Jit: a Keras model in jax.jit, written "
        "by hand, on arrays with NamedSharding over all processes' devices."
    )

    def __init__(self, workers):
        self._worker = workers.cluster.index
        # Keras refuses initial values that differ between processes.
        keras.utils.set_random_seed(0)
        self._distribution = keras.distribution.DataParallel(
            devices=[f"{each.platform}:{each.id}" for each in jax.devices()],
            auto_shard_dataset=False,
        )

    def loop(self, setting):
        scope = self._distribution.scope
        batches = setting.rows_of(self._worker)
        if Version(keras.__version__) < _NEEDS_NO_WEIGHTS:
            batches = [(x, y, np.ones(len(x), "float32")) for x, y in batches]
        return settings.BatchLoop(setting, batches, scope, scope)

    def other_loops(self, setting, strategy):
        everywhere, by_rows = shardings(jax.devices())
        put = functools.partial(jax.make_array_from_process_local_data, by_rows)
        return {
            "jit": JittedLoop(
                *stateless(setting),
                everywhere,
                setting.rows_of(self._worker),
                lambda batch: map(put, batch),
            )
        }

    def collectives(self, arm, steps):
        """Counts the collectives of this process in `steps` steps."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with tempfile.TemporaryDirectory() as folder:
            # A loop waits for its loss, which one device may have before
            # others are done.
            jax.block_until_ready(jax.live_arrays())
            with jax.profiler.trace(folder, profiler_options=options):
                arm(steps)
                jax.block_until_ready(jax.live_arrays())
            paths = pathlib.Path(folder).rglob("*.xplane.pb")
            return sum(map(_collectives_in, paths))

    def close(self):
        """Leaves the runtime to keras_dist."""


def _collectives_in(path):
    """Counts the collectives in a profile."""
    return sum(
        event.name.startswith(_COLLECTIVES)
        for plane in ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
    )
