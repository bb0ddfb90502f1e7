"""What `keras-dist bench fit` compares with on PyTorch."""

from collections.abc import Callable
from typing import Any

import keras
import torch

from keras_dist.launch.bench.fit_loops import ModelLoop
from keras_dist.launch.bench.fit_loops import on_device
from keras_dist.launch.bench.loops import Loop
from keras_dist.launch.bench.profile import Profile
from keras_dist.launch.bench.tasks import Task
from keras_dist_torch.replicas import TorchReplica

TEXT = (
    "loop is a Keras model and its optimizer in an eager loop written by hand, "
    "all of a batch on the first device. DistributedDataParallel needs several "
    "processes: `keras-dist bench workers` compares with it."
)


class EagerLoop(ModelLoop):
    """An eager loop around a Keras model and optimizer.

    Args:
        task: `Task`.
        device: String, where.
    """

    def __init__(self, task: Task, device: str) -> None:
        with on_device(device):
            super().__init__(task.model(), step=EagerLoop._train)
        self._task = task
        self._device = device

    def _train(self, x: Any, y: Any) -> Any:
        model = self.model
        model.zero_grad()
        loss = model.compute_loss(x, y, model(x, training=True))
        loss.backward()
        variables = model.trainable_variables
        with torch.no_grad():
            gradients = [each.value.grad for each in variables]
            model.optimizer.apply(gradients, variables)
        return loss

    def run(self, steps: int) -> float:
        loss = None
        with on_device(self._device):
            for batch in self._task.batches(steps):
                x, y = keras.tree.map_structure(
                    keras.ops.convert_to_tensor, batch
                )
                loss = self._train(x, y)
        return float(loss.detach())  # type: ignore[union-attr]


def native_fits(
    task: Task, devices: tuple[str, ...]
) -> dict[str, Callable[[], ModelLoop]]:
    """A loop written by hand."""
    return {"loop": lambda: EagerLoop(task, devices[0])}


def collectives(loop: Loop, steps: int) -> int:
    """How often the first replica met the others."""
    with Profile({TorchReplica.meet.__code__}) as profile:
        loop.run(steps)
    return profile.of_wanted
