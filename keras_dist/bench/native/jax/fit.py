"""Reference loops on JAX for `keras-dist bench fit`."""

import functools
from typing import Any

import jax
import keras
import numpy as np
from jax import numpy as jnp

from keras_dist.bench.fit_loops import ModelLoop
from keras_dist.bench.native.jax.loops import on_cpu
from keras_dist.bench.native.jax.loops import shardings
from keras_dist.bench.tasks import Task


class JittedModelLoop(ModelLoop):
    """A loop over the model's stateless `train_step`, in `jax.jit`."""

    def __init__(self, task: Task, devices: tuple[str, ...]) -> None:
        super().__init__(task.model())
        self._task = task
        everywhere, self._by_rows = shardings(devices)
        self._waits = len(devices) > 1 and on_cpu(devices)
        model = self.model
        # Builds metrics, and leaves weights alone.
        (batch,) = task.batches(1)
        model.test_on_batch(*batch)
        model.reset_metrics()
        model.optimizer.build(model.trainable_variables)
        # Only memory that JAX allocated can be donated.
        place = jax.jit(
            functools.partial(jax.tree.map, jnp.copy), out_shardings=everywhere
        )

        def placed(variables: list[keras.Variable]) -> Any:
            return place([np.asarray(each.value) for each in variables])

        self._state = (
            placed(model.trainable_variables),
            placed(model.non_trainable_variables),
            placed(model.optimizer.variables),
        )
        self._new_metrics = functools.partial(
            place, [np.asarray(each.value) for each in model.metrics_variables]
        )
        self._step = jax.jit(
            model.train_step,
            donate_argnums=0,
            out_shardings=(everywhere, everywhere),
        )

    def run(self, steps: int) -> float:
        step, by_rows, waits = self._step, self._by_rows, self._waits
        state: Any = (*self._state, self._new_metrics())
        logs: Any = None
        for batch in self._task.batches(steps):
            batch = jax.device_put(batch, by_rows)
            if waits and logs is not None:
                logs["loss"].block_until_ready()
            logs, state = step(state, batch)
        *kept, _ = state
        self._state = tuple(kept)
        return float(logs["loss"])
