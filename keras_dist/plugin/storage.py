"""Storage: the plugin interface to where one variable is kept."""

from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import keras

from keras_dist.core.components import Component
from keras_dist.core.device import Device
from keras_dist.core.plan import num_bytes


class Storage(ABC):
    """The place where one variable rests between steps, on this worker.

    An executor makes one whenever it is asked, so the object has nothing but
    the variable. Each kind of storage is a subclass.

    Args:
        variable: A `keras.Variable` of a strategy.

    Attributes:
        kind: String. `"mirrored"`: each device of the plan has a copy.
            `"central"`: there is a single copy. `"sharded"`: each device has
            a part, and the class is a `ShardedStorage`. Another name is shown
            in summaries, and replicas read such a variable like copies.
    """

    kind = "mirrored"

    def __init__(self, variable: keras.Variable) -> None:
        self.variable = variable

    @property
    @abstractmethod
    def devices(self) -> tuple[Device, ...]:
        """The devices that hold a copy or a part, primary first."""

    @abstractmethod
    def place(self) -> None:
        """Moves the variable's value to its devices.

        It is idempotent and cheap. A variable without a value is left alone.
        """

    @abstractmethod
    def read(self, index: int) -> Any:
        """Returns local replica `index`'s copy of the variable's own value.

        A replica may ask for it, whose scope reads variables from here: so
        read the framework's tensor, or `variable.value` in
        `outside_replicas()`.
        """

    def bytes_kept(self) -> dict[Device, int]:
        """Returns the bytes that each device keeps between steps.

        Returns:
            Dict from `Device` to an integer, primary first. A variable that
            is combined when it is read counts twice where there are both its
            combined value and a replica's own value.
        """
        whole = num_bytes(self.variable)
        kept = dict.fromkeys(self.devices, whole)
        for device in self.component_devices():
            kept[device] = kept.get(device, 0) + whole
        return kept

    def component_devices(self) -> tuple[Device, ...]:
        """Returns the devices that keep the variable's components.

        There are none before the first use of a component, and none at all
        for a variable that has copies only.
        """
        strategy = vars(self.variable).get("distribute_strategy")
        if strategy is None or id(self.variable) not in strategy.has_components:
            return ()
        devices: tuple[Device, ...] = strategy.plan.devices
        return devices

    def component(self, index: int, value: Callable[[], Any]) -> Component:
        """Creates the storage of one replica's own value of the variable.

        Args:
            index: Integer, the local replica's index.
            value: Callable that returns the initial value.
        """
        return Component(value())


class ShardedStorage(Storage):
    """The storage of a variable of which each device has a shard."""

    kind = "sharded"

    @property
    @abstractmethod
    def is_split(self) -> bool:
        """True if the devices have their parts, false for a whole value."""

    def used(self, value: object) -> Any:
        """Returns the value that a layer computes with, given the variable's.

        Inside of a program, the variable's value may be in parts.
        """
        return value

    def set_trainable(self, value: bool) -> None:
        """Called when the variable's `trainable` is set."""

    @abstractmethod
    def whole(self) -> Any:
        """Returns the whole value; with several workers, a collective."""

    def on_host(self) -> Any:
        """Returns the whole value as a NumPy array, or `None` without one.

        No device holds it whole meanwhile, if the backend can do that.
        """
        value = self.whole()
        return None if value is None else keras.ops.convert_to_numpy(value)

    @abstractmethod
    def set_whole(self, value: object) -> None:
        """Splits a whole value into the parts."""
