"""The native training loops of `keras-dist bench fit` on PyTorch."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import torch

from keras_dist.bench.fit_loops import FitLoop
from keras_dist.bench.fit_loops import ModelLoop
from keras_dist.bench.fit_loops import on_device
from keras_dist.bench.loops import Loop
from keras_dist.bench.native.torch.workers import TorchNativeWorkers
from keras_dist.bench.tasks import Task
from keras_dist.core.plan import Cluster
from keras_dist.strategies.multi_worker_mirrored import (
    MultiWorkerMirroredStrategy,
)


class EagerLoop(ModelLoop):
    """An eager loop around a Keras model and optimizer, on one device."""

    def __init__(self, task: Task, device: str) -> None:
        with on_device(device):
            super().__init__(task.model(), step=EagerLoop._train)
        self._task = task
        self._device = device
        self._forward: Callable[..., Any] = self.model

    def _train(self, x: Any, y: Any) -> Any:
        model = self.model
        model.zero_grad()
        loss = model.compute_loss(x, y, self._forward(x, training=True))
        loss.backward()
        variables = model.trainable_variables
        with torch.no_grad():
            gradients = [each.value.grad for each in variables]
            model.optimizer.apply(gradients, variables)
        return loss

    def _placed(self, array: Any) -> Any:
        return keras.ops.convert_to_tensor(array)

    def run(self, steps: int) -> float:
        loss = None
        with on_device(self._device):
            for batch in self._task.batches(steps):
                x, y = keras.tree.map_structure(self._placed, batch)
                loss = self._train(x, y)
        return float(loss.detach())  # type: ignore[union-attr]


class DataParallelLoop(EagerLoop):
    """An `EagerLoop` in DistributedDataParallel, on one worker's rows."""

    def __init__(self, task: Task, cluster: Cluster) -> None:
        super().__init__(task, "cpu:0")
        each = task.size.rows // cluster.num_workers
        self._rows = slice(cluster.index * each, (cluster.index + 1) * each)
        self._forward = torch.nn.parallel.DistributedDataParallel(self.model)

    def _placed(self, array: Any) -> Any:
        return super()._placed(array[self._rows])


@contextlib.contextmanager
def loops_of_worker(task: Task) -> Iterator[dict[str, Loop]]:
    """Gives one process of several its loops: DDP, and `fit` in keras_dist."""
    strategy = MultiWorkerMirroredStrategy()
    workers = strategy.executor.workers
    assert workers is not None
    native = TorchNativeWorkers(workers)
    try:
        yield {
            "DDP": DataParallelLoop(task, workers.cluster),
            "processes": FitLoop(task, strategy.scope),
        }
    finally:
        native.close()
