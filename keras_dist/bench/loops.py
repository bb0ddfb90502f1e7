"""What is measured: a setting, a loop in it, and who can make native ones."""

from abc import ABC
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEARNING_RATE = 1e-3
# What Keras' Adam has, for optimizers whose default is another.
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7

NUM_BATCHES = 4

Batch = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True)
class ModelSize:
    """A multilayer perceptron and the batch it is trained on.

    Args:
        name: String, as in `--models`.
        rows: Integer, the global batch.
        widths: Tuple of integers: features, hidden units, classes.
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

    Args:
        size: `ModelSize`.
        devices: Tuple of device strings, one a replica.
    """

    size: ModelSize
    devices: tuple[str, ...]

    @property
    def num_replicas(self) -> int:
        """How many replicas share a batch."""
        return len(self.devices)

    @property
    def title(self) -> str:
        """What is measured, in words."""
        return f"{self.size.name}, N={self.num_replicas}"

    def weights(self) -> list[NDArray[np.float32]]:
        """Kernels of shape `(inputs, units)` and biases, in turns."""
        rng = np.random.default_rng(0)
        widths = self.size.widths
        weights = []
        for inputs, units in zip(widths[:-1], widths[1:], strict=True):
            kernel = rng.normal(0.0, inputs**-0.5, (inputs, units))
            weights += [kernel.astype("float32"), np.zeros(units, "float32")]
        return weights

    def batches(self, rows: int | None = None) -> list[Batch]:
        """Batches of float32 features and int32 classes.

        The features are the same in each and the classes are not, so that no
        model can fit them: gradients that fade into denormal numbers would
        make late steps slower than early ones.

        Args:
            rows: Integer, how many of the rows; `None` for all.
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
        """Trains, and waits for the last step.

        Args:
            steps: Integer, how many. Batches are taken in turns, from the
                first one on.

        Returns:
            The last step's loss over the global batch.
        """

    def close(self) -> None:
        """Ends what it has started; again does nothing."""


class BenchmarksLoops(ABC):
    """A `Backend` that has the framework's own loop to compare with.

    The optimizer is Keras' default Adam with `LEARNING_RATE`, the loss the
    mean over rows of the cross entropy of softmax.
    """

    @property
    @abstractmethod
    def native_loop_text(self) -> str:
        """What the native loop is, in a sentence for people."""

    @abstractmethod
    def native_loop(self, setting: Setting) -> Loop:
        """The loop as the framework's users write it by hand.

        Args:
            setting: `Setting`.
        """

    def other_loops(self, setting: Setting) -> dict[str, Loop]:
        """Further loops by name, that tell where a difference comes from.

        Such as `"Keras"`, the framework's loop around a Keras model, where
        the native one has none.

        Args:
            setting: `Setting`.
        """
        return {}
