"""Reference loops on JAX for `keras-dist bench workers`."""

import itertools
import tempfile
from pathlib import Path

import jax
import keras
import numpy as np
from jax.profiler import ProfileData
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from keras_dist.bench.benchmarks import NativeWorkers
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.native.jax.loops import stateless
from keras_dist.bench.worker_loops import compiled
from keras_dist.bench.worker_loops import rows_of
from keras_dist.plugin.workers import Workers

# The names of the compiler's operations.
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")


class ShardMapWorkersLoop(Loop):
    """A loop of `train_on_batch` under Keras' own distribution.

    It trains on the rows of the worker with the position `worker`.
    """

    def __init__(
        self,
        setting: Setting,
        worker: int,
        distribution: keras.distribution.DataParallel,
    ) -> None:
        self._distribution = distribution
        self._batches = rows_of(setting, worker)
        with distribution.scope():
            self._model = compiled(setting)

    def run(self, steps: int) -> float:
        step = self._model.train_on_batch
        with self._distribution.scope():
            for x, y in itertools.islice(itertools.cycle(self._batches), steps):
                loss = step(x, y)
        return float(loss)


class JittedWorkersLoop(Loop):
    """A loop of a Keras model's jitted stateless methods, on global arrays.

    It trains on the rows of the worker with the position `worker`.
    """

    def __init__(self, setting: Setting, worker: int) -> None:
        mesh = Mesh(np.array(jax.devices()), ("replica",))
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._by_rows = NamedSharding(mesh, PartitionSpec("replica"))
        state, step = stateless(setting)
        self._state = jax.tree.map(
            lambda value: jax.make_array_from_callback(
                value.shape, everywhere, lambda index: value[index]
            ),
            state,
        )
        self._batches = rows_of(setting, worker)
        self._step = jax.jit(
            step, donate_argnums=0, out_shardings=(everywhere, everywhere)
        )

    def run(self, steps: int) -> float:
        step, state, loss = self._step, self._state, None
        for batch in itertools.islice(itertools.cycle(self._batches), steps):
            x, y = [
                jax.make_array_from_process_local_data(self._by_rows, rows)
                for rows in batch
            ]
            if loss is not None:
                # On CPUs, steps with collectives that are queued behind one
                # another can deadlock.
                loss.block_until_ready()
            state, loss = step(state, x, y)
        self._state = state
        return float(loss)  # type: ignore[arg-type]


class JaxNativeWorkers(NativeWorkers):
    """`keras.distribution.DataParallel` over all workers' devices.

    It runs on the cluster that keras_dist has joined.
    """

    text = (
        "`train_on_batch` under keras.distribution.DataParallel over the "
        "devices of all processes; each takes its rows of NumPy batches. "
        "Before each step it resets metrics, which workers meet for. Jit: "
        "a Keras model in jax.jit, written by hand, on arrays with "
        "NamedSharding over all processes' devices."
    )

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers)
        # Keras refuses initial values that differ between processes.
        keras.utils.set_random_seed(0)
        self._distribution = keras.distribution.DataParallel(
            devices=[str(device) for device in jax.devices()],
            auto_shard_dataset=False,
        )

    def loop(self, setting: Setting) -> Loop:
        return ShardMapWorkersLoop(setting, self.worker, self._distribution)

    def collectives(self, loop: Loop, steps: int) -> int:
        return collectives_run(loop, steps)

    def other_loops(self, setting: Setting) -> dict[str, Loop]:
        return {"jit": JittedWorkersLoop(setting, self.worker)}


def collectives_run(loop: Loop, steps: int) -> int:
    """Counts the collectives of this process' devices in `steps` steps."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        # A loop waits for its loss, which one device may have before others
        # are done.
        jax.block_until_ready(jax.live_arrays())
        with jax.profiler.trace(folder, profiler_options=options):
            loop.run(steps)
            jax.block_until_ready(jax.live_arrays())
        return sum(map(_collectives_in, Path(folder).rglob("*.xplane.pb")))


def _collectives_in(path: Path) -> int:
    """Counts the collectives in a profile."""
    return sum(
        event.name.startswith(_COLLECTIVES)
        for plane in ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
    )
