"""JAX' profiler."""

import contextlib

import jax

from keras_dist.plugins import Profiler


class JaxProfiler(Profiler):
    """`jax.profiler`, which writes files of XProf."""

    def start(self, folder: str) -> None:
        _wait()
        jax.profiler.start_trace(folder)

    def stop(self) -> None:
        _wait()
        jax.profiler.stop_trace()

    def step(self, number: int) -> contextlib.AbstractContextManager[object]:
        step: contextlib.AbstractContextManager[object] = (
            jax.profiler.StepTraceAnnotation("train", step_num=number)
        )
        return step


def _wait() -> None:
    """Waits for the programs that this process has started."""
    jax.block_until_ready(jax.live_arrays())
