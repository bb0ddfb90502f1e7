"""Methods that place tensors on the logical devices of a replica."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist.replica.strategy_core import StrategyBase


class LogicalDeviceMethods(StrategyBase):
    """Methods that place tensors on the logical devices of a replica.

    Replicas have one logical device at present, so nothing is moved: each
    method checks its arguments and returns the tensor.
    """

    def experimental_assign_to_logical_device(
        self, tensor: Any, logical_device_id: int
    ) -> Any:
        """Keeps a tensor on one logical device of the replica.

        Args:
            tensor: Tensor to place.
            logical_device_id: Integer, from 0.

        Returns:
            The tensor, with the same value.

        Raises:
            ValueError: If a replica has no such logical device.
            NotImplementedError: If a replica has several logical devices.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.experimental_assign_to_logical_device(1.5, 0)
        1.5
        """
        count = self._num_logical_devices
        is_integer = isinstance(logical_device_id, (int, np.integer))
        if not is_integer or not 0 <= logical_device_id < count:
            raise ValueError(
                "`logical_device_id` must be a logical device of the replica. "
                f"Received: logical_device_id={logical_device_id!r}. Expected: "
                f"an integer from 0 to {count - 1}; a replica of {self!r} has "
                f"{count} logical device(s)."
            )
        return self._unmoved(tensor)

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """Splits a tensor over the logical devices of the replica.

        Args:
            tensor: Tensor to split.
            partition_dimensions: List or tuple with an integer for each axis,
                the number of parts along that axis.

        Returns:
            The tensor, with the same value.

        Raises:
            ValueError: If there is not one integer for each axis, if an axis
                can't be divided by its integer, or if the integers' product is
                not the number of logical devices.
            NotImplementedError: If a replica has several logical devices.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> x = np.ones((2, 3))
        >>> strategy.experimental_split_to_logical_devices(x, [1, 1]) is x
        True
        """
        self._check_split(tensor, partition_dimensions)
        return self._unmoved(tensor)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Keeps a copy of a tensor on each logical device of the replica.

        Args:
            tensor: Tensor to copy.

        Returns:
            The tensor, with the same value.

        Raises:
            NotImplementedError: If a replica has several logical devices.

        Example:

        >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.experimental_replicate_to_logical_devices(1.5)
        1.5
        """
        return self._unmoved(tensor)

    @property
    def _num_logical_devices(self) -> int:
        return len(self.plan.replicas[0])

    def _unmoved(self, tensor: Any) -> Any:
        count = self._num_logical_devices
        if count > 1:
            raise NotImplementedError(
                "A tensor can't be spread over several logical devices yet. "
                f"Received: {self!r}, whose replicas have {count} each. "
                "Expected: a plan with one logical device a replica."
            )
        return tensor

    def _check_split(self, tensor: Any, dimensions: Any) -> None:
        shape = tuple(getattr(tensor, "shape", np.shape(tensor)))
        received = (
            f"Received: partition_dimensions={dimensions!r} for a tensor of "
            f"shape {shape}."
        )
        if not isinstance(dimensions, (list, tuple)) or not all(
            isinstance(each, (int, np.integer)) and each > 0
            for each in dimensions
        ):
            raise ValueError(
                "`partition_dimensions` must be a list of positive integers. "
                f"{received}"
            )
        if len(dimensions) != len(shape):
            raise ValueError(
                "`partition_dimensions` must have as many elements as the "
                f"tensor has axes, {len(shape)}. {received}"
            )
        for axis, (size, parts) in enumerate(
            zip(shape, dimensions, strict=True)
        ):
            if size is not None and size % parts:
                raise ValueError(
                    "`partition_dimensions` must divide the tensor: axis "
                    f"{axis} of size {size} can't be split into {parts}. "
                    f"{received}"
                )
        count = self._num_logical_devices
        if np.prod(dimensions, dtype=int) != count:
            raise ValueError(
                "The product of `partition_dimensions` must be the number of "
                f"logical devices of a replica, {count}. {received}"
            )
