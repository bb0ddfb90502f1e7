"""The workers of a cluster that a program is compiled for."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_dist.plugins import Workers
from keras_dist_jax.cluster.workers import JaxWorkers
from keras_dist_jax.throttle import Throttle


class TargetWorkers(JaxWorkers):
    """Workers that are not here: all of them would do what this one does."""

    def __init__(self, *args: Any) -> None:
        # Without devices, nothing else of `JaxWorkers` can be made.
        Workers.__init__(self, *args)

    def swap(self, data: np.ndarray) -> np.ndarray:
        return np.stack([data] * self.cluster.num_workers)

    def sum(self, tensors: Sequence[Any], *, what: str = "a sum") -> list[Any]:
        return [tensor * self.cluster.num_workers for tensor in tensors]

    def gather(
        self, tensors: Sequence[Any], *, what: str = "a gather"
    ) -> list[list[Any]]:
        return [list(tensors) for _ in range(self.cluster.num_workers)]

    def broadcast(self, tensors: Sequence[Any]) -> list[Any]:
        return list(tensors)

    def concatenate(self, tensor: object, axis: int) -> Any:
        return ops.concatenate([tensor] * self.cluster.num_workers, axis=axis)

    def concatenate_numbers(
        self, numbers: Sequence[Any], what: str = ""
    ) -> list[Any]:
        return [*numbers] * self.cluster.num_workers

    def sizes(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers) for _ in range(self.cluster.num_workers)]

    def barrier(self, what: str, layout: str = "") -> None:
        """There is nobody to wait for."""

    def watched(self, throttle: Throttle) -> Throttle:
        return throttle

    def leave(self, reason: str, failed: bool) -> None:
        """There is nobody to leave."""
