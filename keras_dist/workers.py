"""Workers: how one worker of a cluster reaches the others."""

from abc import ABC
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_dist.cluster import Cluster
from keras_dist.errors import ClusterError
from keras_dist.inputs.communication import CommunicationOptions
from keras_dist.reduction import ReduceOp
from keras_dist.reduction import combine
from keras_dist.training.shares import Share


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

    def check_same(self, cluster: Cluster) -> None:
        """Refuses another cluster than the one that the process belongs to.

        Raises:
            ClusterError: If it is another one.
        """
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
            shares: Sequence with the `Share` of each worker: with equal ones,
                sizes are equal too.
        """
        if len({share.rows for share in shares}) == 1:
            return self.gather(tensors)
        own = [t.shape[0] if len(t.shape) else 0 for t in tensors]
        everyone = np.reshape(
            self.concatenate_numbers(own), (self.cluster.num_workers, -1)
        )
        most = everyone.max(axis=0)
        padded = [
            _padded(tensor, int(rows))
            for tensor, rows in zip(tensors, most, strict=True)
        ]
        return [
            [
                tensor[: int(rows)] if len(tensor.shape) else tensor
                for tensor, rows in zip(each, sizes, strict=True)
            ]
            for each, sizes in zip(self.gather(padded), everyone, strict=True)
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


def _padded(tensor: Any, rows: int) -> Any:
    if not len(tensor.shape):
        return tensor
    others = [(0, 0)] * (len(tensor.shape) - 1)
    return ops.pad(tensor, [(0, rows - tensor.shape[0]), *others])
