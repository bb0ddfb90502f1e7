"""Workers: how one worker of a cluster reaches the others."""

from abc import ABC
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_dist.core.cluster import Cluster
from keras_dist.core.communication import CommunicationOptions
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.reduction import combine
from keras_dist.core.rows import Share
from keras_dist.errors import ClusterError


class Workers(ABC):
    """The collectives of the workers of a cluster, by the framework's engine.

    Every worker makes the same calls in the same order, from one thread at a
    time. Tensors are on this worker's devices; results are on the primary one.

    Args:
        cluster: The `Cluster`.
        options: `CommunicationOptions`.
    """

    def __init__(self, cluster: Cluster, options: CommunicationOptions) -> None:
        self.cluster = cluster
        self.options = options

    def check_same(
        self, cluster: Cluster, options: CommunicationOptions
    ) -> None:
        """Refuses another cluster than the one that the process belongs to.

        Args:
            cluster: The `Cluster` that is asked for.
            options: `CommunicationOptions`; the default ones fit any.

        Raises:
            ClusterError: If it is another one, or has other options.
        """
        if options not in (self.options, CommunicationOptions()):
            raise ClusterError(
                "A process meets the others once, with the options of the "
                f"first strategy. Received: {options}. It has {self.options}. "
                "Pass the same `communication_options` to all strategies."
            )
        if cluster != self.cluster:
            raise ClusterError(
                "A process belongs to one cluster for as long as it lives. "
                f"Received: {cluster}. It belongs to {self.cluster}. Make all "
                "strategies with the same cluster resolver."
            )

    @abstractmethod
    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums each tensor over the workers, in as few collectives as can be.

        Args:
            tensors: Sequence of tensors of any number dtype, of the same
                shapes and dtypes on each worker.

        Returns:
            List of tensors of these shapes and dtypes.
        """

    @abstractmethod
    def gather(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """Every worker's tensors, to every worker.

        Args:
            tensors: Sequence of tensors, of the same shapes and dtypes on
                each worker.

        Returns:
            List with, for each worker in order, the list of its tensors.
        """

    def gather_rows(
        self, tensors: Sequence[Any], shares: Sequence[Share]
    ) -> list[list[Any]]:
        """`gather`, of tensors whose first axis may be of another size.

        Args:
            tensors: Sequence of tensors. The first axis may be as long as
                the worker has rows, or depend on them in another way.
            shares: Sequence with the `Share` of each worker. Where sizes are
                those, one collective does; else there are two.
        """
        # As many rows of each as the worker with most has; what has another
        # number says so, and is sent again.
        most = max(share.rows for share in shares)
        own = [t.shape[0] if len(t.shape) else 0 for t in tensors]
        slots = [_with_rows(tensor, most) for tensor in tensors]
        numbers = ops.convert_to_tensor(np.asarray(own, "int32"))
        everyone = self.gather([numbers, *slots])
        sizes = np.stack([ops.convert_to_numpy(each[0]) for each in everyone])
        found = [list(each[1:]) for each in everyone]
        expected = np.asarray([[share.rows] for share in shares])
        others = [
            i
            for i, tensor in enumerate(tensors)
            if len(tensor.shape) and (sizes[:, i : i + 1] != expected).any()
        ]
        if others:
            longest = [int(sizes[:, i].max()) for i in others]
            again = self.gather(
                [
                    _with_rows(tensors[i], rows)
                    for i, rows in zip(others, longest, strict=True)
                ]
            )
            for each, values in zip(found, again, strict=True):
                for i, value in zip(others, values, strict=True):
                    each[i] = value
        return [
            [
                value[: int(rows)] if len(value.shape) else value
                for value, rows in zip(each, own_sizes, strict=True)
            ]
            for each, own_sizes in zip(found, sizes, strict=True)
        ]

    @abstractmethod
    def broadcast(self, tensors: Sequence[Any]) -> list[Any]:
        """The chief's tensors, to every worker.

        Args:
            tensors: Sequence of tensors, of the same shapes and dtypes on
                each worker.
        """

    @abstractmethod
    def concatenate(self, tensor: Any, axis: int) -> Any:
        """Joins the workers' tensors, in worker order.

        Args:
            tensor: Tensor with at least one axis.
            axis: Integer, not negative, along which sizes may differ.
        """

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for an error that came while workers ran together.

        Args:
            error: What the framework, or the user's code, raised.

        Returns:
            A `WorkerLostError` that names the workers that were lost, if that
            is the cause; else `error` itself.
        """
        return error

    def leave(self, reason: str, failed: bool) -> None:
        """Called when this process is about to end.

        Args:
            reason: String, what to tell the other workers.
            failed: Boolean, whether an exception ends it: then nobody is
                waited for.
        """

    def combine(self, op: ReduceOp, value: Any, num_replicas: int) -> Any:
        """Combines what the workers have combined of their own replicas.

        Args:
            op: `ReduceOp`.
            value: Tensor, what `op` makes of this worker's replicas; of
                `MEAN`, their sum.
            num_replicas: Integer, replicas over all workers.

        Returns:
            Tensor. `MEAN` of integers is a float.
        """
        if op is ReduceOp.SUM:
            return self.sum([value])[0]
        if op is ReduceOp.MEAN:
            total = self.sum([value])[0]
            return ops.true_divide(total, num_replicas)
        return combine(op, [each[0] for each in self.gather([value])])

    def chief_value(self, value: np.ndarray) -> np.ndarray:
        """A NumPy array of the chief's, to every worker."""
        tensor = ops.convert_to_tensor(value)
        return np.asarray(ops.convert_to_numpy(self.broadcast([tensor])[0]))

    def concatenate_numbers(self, numbers: Sequence[Any]) -> list[Any]:
        """The integers of all workers, in worker order.

        Args:
            numbers: Sequence of integers below 2**31, or of integer scalar
                tensors in a graph; as many on each worker.
        """
        own = ops.stack([ops.cast(number, "int32") for number in numbers])
        joined = ops.concatenate([each[0] for each in self.gather([own])])
        if any(ops.is_tensor(number) for number in numbers):
            return [joined[i] for i in range(joined.shape[0])]
        return [int(number) for number in ops.convert_to_numpy(joined)]


def total_of(op: ReduceOp) -> ReduceOp:
    """What a worker combines its own replicas' values with, for `op`."""
    return ReduceOp.SUM if op is ReduceOp.MEAN else op


def _with_rows(tensor: Any, rows: int) -> Any:
    """A tensor with that many rows: cut, or filled up with zeros."""
    if not len(tensor.shape):
        return tensor
    missing = max(rows - tensor.shape[0], 0)
    others = [(0, 0)] * (len(tensor.shape) - 1)
    return ops.pad(tensor[:rows], [(0, missing), *others])
