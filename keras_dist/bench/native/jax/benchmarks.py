"""The loops and counts that `keras-dist bench` compares with on JAX."""

from collections.abc import Callable

import jax
import keras

from keras_dist.bench.benchmarks import Benchmarks
from keras_dist.bench.fit_loops import FitLoop
from keras_dist.bench.fit_loops import ModelLoop
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.native.jax import fit
from keras_dist.bench.native.jax.loops import JittedLoop
from keras_dist.bench.native.jax.loops import native_state
from keras_dist.bench.native.jax.loops import native_step
from keras_dist.bench.native.jax.loops import replica_step
from keras_dist.bench.native.jax.loops import stateless
from keras_dist.bench.native.jax.workers import JaxNativeWorkers
from keras_dist.bench.native.jax.workers import collectives_run
from keras_dist.bench.tasks import Task
from keras_dist.core.device import Device
from keras_dist_jax.layout import jax_devices


class JaxBenchmarks(Benchmarks):
    """Loops in `jax.jit`, and `fit` under `keras.distribution`."""

    loop_text = (
        "jax.jit with donated state, written by hand without Keras; with "
        "several devices NamedSharding, on CPUs waiting for one step before "
        "the next. Shmap: jax.shard_map in its place."
    )
    fits_text = (
        "DataParallel is `fit` under keras.distribution.DataParallel; jit is "
        "the model's own `train_step` in jax.jit, in a loop written by hand "
        "that puts each batch on the devices with NamedSharding, on CPUs "
        "waiting for one step before the next."
    )
    live_bytes_text = (
        "Measured: every live `jax.Array` of the process, each buffer once."
    )
    native_workers = JaxNativeWorkers

    def native_loop(self, setting: Setting) -> Loop:
        return JittedLoop(setting, native_state(setting), native_step)

    def other_loops(self, setting: Setting) -> dict[str, Loop]:
        loops: dict[str, Loop] = {
            "Keras": JittedLoop(setting, *stateless(setting))
        }
        if setting.num_replicas > 1:
            loops["shmap"] = JittedLoop(
                setting, native_state(setting), replica_step, by_hand=True
            )
        return loops

    def native_fits(
        self, task: Task, devices: tuple[str, ...]
    ) -> dict[str, Callable[[], ModelLoop]]:
        distribution = keras.distribution.DataParallel(
            devices=list(devices), auto_shard_dataset=False
        )
        scope = distribution.scope
        return {
            "DataParallel": lambda: FitLoop(task, scope, scope),
            "jit": lambda: fit.JittedModelLoop(task, devices),
        }

    def fit_collectives(self, loop: Loop, steps: int, num_replicas: int) -> int:
        return collectives_run(loop, steps) // num_replicas

    def live_bytes(self, model: keras.Model) -> dict[Device, int]:
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
