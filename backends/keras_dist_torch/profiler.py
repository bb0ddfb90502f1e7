"""PyTorch's profiler."""

import contextlib
from typing import Any

import torch
from torch import profiler

from keras_dist.plugins import Profiler
from keras_dist_torch.torch_internals import of_all_threads


class TorchProfiler(Profiler):
    """`torch.profiler`, which writes a file for Perfetto and TensorBoard."""

    def __init__(self) -> None:
        self._running: Any = None

    def start(self, folder: str) -> None:
        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            activities.append(profiler.ProfilerActivity.CUDA)
        running = profiler.profile(
            activities=activities,
            on_trace_ready=profiler.tensorboard_trace_handler(folder),
            # Replicas compute in threads.
            experimental_config=of_all_threads(),
        )
        running.start()
        self._running = running

    def stop(self) -> None:
        running, self._running = self._running, None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        running.stop()

    def step(self, number: int) -> contextlib.AbstractContextManager[object]:
        # PyTorch's own name for it, which tools look for.
        step: contextlib.AbstractContextManager[object] = (
            profiler.record_function(f"ProfilerStep#{number}")
        )
        return step
