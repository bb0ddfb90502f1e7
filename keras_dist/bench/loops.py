"""Settings, and what a loop is."""

from abc import ABC
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEARNING_RATE = 1e-3
# Defaults of Keras' Adam, for optimizers that have other ones.
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7

NUM_BATCHES = 4

Batch = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True)
class ModelSize:
    """A multilayer perceptron and the batch it is trained on.

    `rows` is the global batch; `widths` are features, hidden units, classes.
    """

    name: str
    rows: int
    widths: tuple[int, ...]


MODELS = {
    size.name: size
    for size in (
        ModelSize("small", 64, (64, 32, 10)),
        ModelSize("medium", 256, (256, 1024, 1024, 10)),
    )
}


@dataclass(frozen=True)
class Setting:
    """A model on devices; every arm starts with its weights and batches.

    `devices` has one device for each replica.
    """

    size: ModelSize
    devices: tuple[str, ...]

    @property
    def num_replicas(self) -> int:
        """The number of replicas that share a batch."""
        return len(self.devices)

    @property
    def title(self) -> str:
        """The model's name and the number of replicas."""
        return f"{self.size.name}, N={self.num_replicas}"

    def weights(self) -> list[NDArray[np.float32]]:
        """Returns kernels of shape `(inputs, units)` and biases, in turns."""
        rng = np.random.default_rng(0)
        widths = self.size.widths
        weights = []
        for inputs, units in zip(widths[:-1], widths[1:], strict=True):
            kernel = rng.normal(0.0, inputs**-0.5, (inputs, units))
            weights += [kernel.astype("float32"), np.zeros(units, "float32")]
        return weights

    def batches(self, rows: int | None = None) -> list[Batch]:
        """Returns batches of float32 features and int32 classes.

        All batches have the same features and different classes, so that no
        model can fit them: gradients that fade into denormal numbers would make
        late steps slower than early ones. Each batch is cut to `rows`, if that
        is given.
        """
        rng = np.random.default_rng(1)
        size = self.size
        x = rng.normal(size=(size.rows, size.widths[0])).astype("float32")
        return [
            (x[:rows], each[:rows])
            for each in rng.integers(
                0, size.widths[-1], (NUM_BATCHES, size.rows), "int32"
            )
        ]


class Loop(ABC):
    """A training loop whose model is built and whose batches are placed."""

    @abstractmethod
    def run(self, steps: int) -> float:
        """Trains for a number of steps, and waits for the last one.

        Batches are taken in turns, from the first one on. Returns the last
        step's loss over the global batch.
        """

    def close(self) -> None:
        """Ends what the loop has started; a second call does nothing."""
