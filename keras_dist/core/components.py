"""The components of distributed variables."""

from typing import Any

import keras
from keras import ops


class Component:
    """One replica's own value of a variable, a tensor on its device."""

    def __init__(self, value: object) -> None:
        self._value = value

    def read(self) -> Any:
        """Returns the value."""
        return self._value

    def write(self, value: object) -> None:
        """Replaces the value as a whole."""
        self._value = value


class VariableComponent(keras.Variable):
    """One replica's component of a distributed variable, the container."""

    def __init__(self, container: Any, index: int) -> None:
        self.__dict__.update(vars(container))
        self.container = container
        self.index = index
        self._pending: list[Any] | None = None
        if index:
            self._path = f"{container.path}/replica_{index}"

    @property
    def value(self) -> Any:
        if self._pending:
            return self._pending[-1]
        return self.container.component_value(self.index)

    def assign(self, value: Any) -> Any:
        value = self._convert_to_tensor(value, dtype=self._dtype)
        if tuple(value.shape) != tuple(self.shape):
            raise ValueError(
                "The shape of the target variable and the shape of the target "
                "value in `variable.assign(value)` must match. Received: "
                f"value.shape={value.shape} for '{self.path}' of shape "
                f"{self.shape}."
            )
        if self._pending is not None:
            self._pending.append(value)
        else:
            self.container.write_component(self.index, value)
        return value

    def collect(self) -> "list[Any]":
        """Returns a list that records all later assignments instead."""
        self._pending = []
        return self._pending

    def __repr__(self) -> str:
        try:
            value = f", value={ops.convert_to_numpy(self.value)}"
        except Exception:  # in a trace; each framework raises its own error
            value = ""
        return (
            f"<Variable path={self.path}, shape={tuple(self.shape)}, "
            f"dtype={self._dtype}{value}>"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> keras.Variable:
        return keras.Variable(self.value, dtype=self._dtype, name=self.name)
