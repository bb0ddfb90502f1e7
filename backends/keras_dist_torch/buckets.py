"""Buckets: gradients that travel between workers together."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch

from keras_dist_torch.workers import TorchWorkers

# Bytes of a bucket, where the options leave it to us.
BUCKET_BYTES = 25 * 2**20


def sum_in_buckets(
    gradients: Sequence[Any], workers: TorchWorkers
) -> list[Any]:
    """Sums gradients over workers; buckets are on their way side by side.

    Args:
        gradients: Sequence of tensors, `None` for variables without.
        workers: `TorchWorkers`.

    Returns:
        List of tensors and `None`s.
    """
    present = [g for g in gradients if g is not None]
    limit = workers.options.bytes_per_pack or BUCKET_BYTES
    started = [Bucket(present[part], workers) for part in split(present, limit)]
    summed = iter([g for bucket in started for g in bucket.finish()])
    return [None if g is None else next(summed) for g in gradients]


def split(gradients: Sequence[torch.Tensor], limit: int) -> list[slice]:
    """Where each bucket begins and ends: neighbours of one dtype and device.

    Args:
        gradients: Sequence of tensors.
        limit: Integer, bytes of a bucket; one larger tensor is one bucket.
    """
    parts: list[slice] = []
    start, size = 0, 0
    for index, gradient in enumerate(gradients):
        first = gradients[start]
        alike = (gradient.dtype, gradient.device) == (first.dtype, first.device)
        if index > start and (not alike or size + gradient.nbytes > limit):
            parts.append(slice(start, index))
            start, size = index, 0
        size += gradient.nbytes
    if len(gradients) > start:
        parts.append(slice(start, len(gradients)))
    return parts


class Bucket:
    """Gradients whose sum over workers is under way.

    Args:
        gradients: Sequence of tensors of one dtype, on one device.
        workers: `TorchWorkers`.
    """

    def __init__(
        self, gradients: Sequence[torch.Tensor], workers: TorchWorkers
    ) -> None:
        self._gradients = gradients
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dtype = workers.options.dtype
        if dtype is not None and flat.dtype == torch.float32:
            flat = flat.to(getattr(torch, dtype))
        self._flat = flat
        self._wait: Callable[[], None] = workers.start_sum(flat)

    def finish(self) -> list[torch.Tensor]:
        """Waits for the sums; tensors like the gradients."""
        self._wait()
        sizes = [gradient.numel() for gradient in self._gradients]
        return [
            part.reshape(gradient.shape).to(gradient.dtype)
            for part, gradient in zip(
                self._flat.split(sizes), self._gradients, strict=True
            )
        ]


# Of a variable: which place its gradient has in which order.
_PLACE = "_keras_dist_bucket"


class Order:
    """How an optimizer's gradients are put into buckets.

    Args:
        gradients: Sequence of its gradients; `None` for variables without.
        limit: Integer, bytes of a bucket.

    Attributes:
        buckets: List with the positions in each bucket. The last variables
            come first, because their gradients do.
        is_used: Whether buckets may leave before all gradients are there.
    """

    def __init__(self, gradients: Sequence[Any], limit: int) -> None:
        self.positions = [
            i for i, g in reversed(list(enumerate(gradients))) if g is not None
        ]
        self.length = len(gradients)
        parts = split([gradients[i] for i in self.positions], limit)
        self.buckets = [self.positions[part] for part in parts]
        self.bucket_of = {
            position: number
            for number, bucket in enumerate(self.buckets)
            for position in bucket
        }
        self.is_used = True

    def fits(self, gradients: Sequence[Any]) -> bool:
        """Whether these are gradients of the same variables."""
        return self.length == len(gradients) and self.positions == [
            i for i, g in reversed(list(enumerate(gradients))) if g is not None
        ]


class Overlap:
    """Sums gradients over workers while the backward pass still runs.

    Buckets leave in one order on every worker, each as soon as all local
    replicas have its gradients. What an optimizer is given later may be
    something else, such as the sum of two passes: then its buckets are sent
    again, and not early any more.

    Args:
        workers: `TorchWorkers`.
        weights: Sequence with the weight of each replica that takes part.
    """

    def __init__(self, workers: TorchWorkers, weights: Sequence[float]) -> None:
        self._workers = workers
        self._weights = list(weights)
        # By order and position: each replica's gradient, and its version.
        self._ready: dict[Order, dict[int, dict[int, tuple[Any, int]]]] = {}
        self._sent: dict[Order, list[Bucket]] = {}

    def watch(self, variable: Any, leaf: torch.Tensor, replica: int) -> None:
        """Waits for a replica's gradient of a variable.

        Args:
            variable: The `keras.Variable`.
            leaf: Tensor that the replica reads it as.
            replica: Integer, its position among those that take part.
        """
        order, position = vars(variable).get(_PLACE, (None, 0))
        if order is None or not order.is_used:
            return

        def arrived(leaf: torch.Tensor) -> None:
            self._arrived(order, position, replica, leaf.grad)

        leaf.register_post_accumulate_grad_hook(arrived)

    def sum(
        self, gradients: Sequence[Sequence[Any]], own: list[Any], variables: Any
    ) -> list[Any]:
        """Sums over workers, with what is under way already.

        Args:
            gradients: For each replica that takes part, its gradients.
            own: List with their weighted sums.
            variables: Sequence of the variables that they belong to.
        """
        order = next(
            (vars(v)[_PLACE][0] for v in variables if _PLACE in vars(v)), None
        )
        if order is None or not order.fits(own):
            limit = self._workers.options.bytes_per_pack or BUCKET_BYTES
            order = Order(own, limit)
            for position, variable in enumerate(variables):
                setattr(variable, _PLACE, (order, position))
        sent = self._sent.pop(order, [])
        if sent and not self._is_same(order, gradients):
            order.is_used = False
            for bucket in sent:
                bucket.finish()
            sent = []
        self._ready.pop(order, None)
        started = sent + [
            Bucket([own[i] for i in positions], self._workers)
            for positions in order.buckets[len(sent) :]
        ]
        summed = list(own)
        for positions, bucket in zip(order.buckets, started, strict=True):
            for position, total in zip(positions, bucket.finish(), strict=True):
                summed[position] = total
        return summed

    def close(self) -> None:
        """Waits for what nobody asked for."""
        for buckets in self._sent.values():
            for bucket in buckets:
                bucket.finish()
        self._sent.clear()
        self._ready.clear()

    def _arrived(
        self, order: Order, position: int, replica: int, gradient: Any
    ) -> None:
        ready = self._ready.setdefault(order, {})
        own = (gradient, gradient._version)
        # A later one is another: what was sent is the first.
        ready.setdefault(position, {}).setdefault(replica, own)
        sent = self._sent.setdefault(order, [])
        while len(sent) < len(order.buckets):
            positions = order.buckets[len(sent)]
            if any(
                len(ready.get(p, ())) < len(self._weights) for p in positions
            ):
                return
            with torch.no_grad():
                sums = [self._weighted(ready[p]) for p in positions]
                sent.append(Bucket(sums, self._workers))

    def _weighted(self, by_replica: dict[int, tuple[Any, int]]) -> Any:
        total = None
        for replica, weight in enumerate(self._weights):
            gradient, _ = by_replica[replica]
            term = weighted(gradient, weight)
            total = term if total is None else total + term
        return total

    def _is_same(
        self, order: Order, gradients: Sequence[Sequence[Any]]
    ) -> bool:
        ready = self._ready.get(order, {})
        return all(
            gradients[replica][position] is gradient
            and gradient._version == version
            for position, by_replica in ready.items()
            for replica, (gradient, version) in by_replica.items()
        )


def weighted(gradient: torch.Tensor, weight: float) -> torch.Tensor:
    """A replica's part of a sum; with no weight, NaN is silenced too."""
    return gradient * weight if weight else torch.zeros_like(gradient)
