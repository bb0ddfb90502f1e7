"""What memory a training really holds, and who can tell."""

from abc import ABC
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import keras

from keras_dist.core.device import Device


@dataclass(frozen=True)
class MeasuredMemory:
    """What one arm holds between steps.

    Args:
        arm: String, its name.
        parameters: Integer, how many are trained.
        measured: Dict from each device's name to the bytes alive there.
        planned: Dict, likewise, of what `keras-dist plan` computes.
        bytes_sent: Integer, what it computes of each step's traffic.
    """

    arm: str
    parameters: int
    measured: Mapping[str, int]
    planned: Mapping[str, int]
    bytes_sent: int


class MeasuresMemory(ABC):
    """A `Backend` that can count what is alive on each device."""

    @property
    @abstractmethod
    def live_bytes_text(self) -> str:
        """What is counted, in a sentence or two for people."""

    @abstractmethod
    def live_bytes(self, model: keras.Model) -> Mapping[Device, int]:
        """What this process holds on each device, in bytes.

        Everything that is alive counts, whoever holds it. Devices that hold
        nothing may be left out.

        Args:
            model: A `keras.Model`, which tells what memory is kept for whom,
                where the framework does not.
        """
