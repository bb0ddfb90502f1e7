"""What `keras-dist bench workers` compares with on JAX."""

import itertools

import jax
import keras

from keras_dist.launch.bench.loops import Loop
from keras_dist.launch.bench.loops import Setting
from keras_dist.launch.bench.worker_loops import NativeWorkers
from keras_dist.launch.bench.worker_loops import compiled
from keras_dist.launch.bench.worker_loops import rows_of
from keras_dist.workers import Workers


class DataParallelLoop(Loop):
    """`train_on_batch` under Keras' own distribution.

    Args:
        setting: `Setting`.
        worker: Integer, whose rows to train on.
        distribution: The `keras.distribution.DataParallel`.
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


class JaxNativeWorkers(NativeWorkers):
    """`keras.distribution.DataParallel` over all workers' devices.

    Args:
        workers: `Workers`, whose runtime it shares.
    """

    def __init__(self, workers: Workers) -> None:
        self._worker = workers.cluster.index
        # Keras refuses initial values that differ between processes.
        keras.utils.set_random_seed(0)
        self._distribution = keras.distribution.DataParallel(
            devices=[str(device) for device in jax.devices()],
            auto_shard_dataset=False,
        )

    @property
    def text(self) -> str:
        return (
            "`train_on_batch` under keras.distribution.DataParallel over the "
            "devices of all processes; each takes its rows of NumPy batches."
        )

    def loop(self, setting: Setting) -> Loop:
        return DataParallelLoop(setting, self._worker, self._distribution)

    def collectives(self, loop: Loop, steps: int) -> int:
        import tempfile, pathlib, collections
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                loop.run(steps)
            c=collections.Counter()
            for path in pathlib.Path(folder).rglob("*.xplane.pb"):
                d=jax.profiler.ProfileData.from_file(str(path))
                for plane in d.planes:
                    for line in plane.lines:
                        for e in line.events:
                            c[e.name]+=1
        print(type(loop).__name__, steps,[x for x in c.items() if "all" in x[0] or "ollective" in x[0]])
        return 0

    def close(self) -> None:
        """The runtime is ours, and goes on."""
