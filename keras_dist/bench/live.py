"""The memory that a training holds, and the interface to measure it."""

from abc import ABC
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import keras

from keras_dist.core.device import Device


@dataclass(frozen=True)
class MeasuredMemory:
    """The memory of one arm between steps.

    Args:
        arm: The arm's name.
        parameters: Number of trainable parameters.
        measured: Bytes alive on each device, by its name.
        planned: Bytes on each device that `keras-dist plan` computes.
        bytes_sent: Bytes sent in a step that `keras-dist plan` computes.
    """

    arm: str
    parameters: int
    measured: Mapping[str, int]
    planned: Mapping[str, int]
    bytes_sent: int


class MeasuresMemory(ABC):
    """A `Backend` that can count the bytes that are alive on each device."""

    @property
    @abstractmethod
    def live_bytes_text(self) -> str:
        """A description of what is counted, in a sentence or two for people."""

    @abstractmethod
    def live_bytes(self, model: keras.Model) -> Mapping[Device, int]:
        """Returns the bytes that this process holds on each device.

        Everything that is alive counts, whoever holds it. Devices that hold
        nothing may be left out. `model` tells the device of each variable, for
        frameworks that don't know virtual devices.
        """
