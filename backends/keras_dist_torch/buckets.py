"""Buckets of gradients, each summed over workers in one collective."""

import itertools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import torch

from keras_dist_torch.hooks import after_accumulation
from keras_dist_torch.workers import TorchWorkers

# Bytes of a bucket, unless options set them.
BUCKET_BYTES = 25 * 2**20
# Attribute of a variable: the `Order` of its gradient, and the position in it.
_PLACE = "_keras_dist_bucket"


class Order:
    """The assignment of an optimizer's gradients to buckets.

    It is the same on every worker.

    Args:
        variables: Sequence of the variables.
        limit: Integer, bytes of a bucket; a larger gradient is a bucket alone.

    Attributes:
        likes: List with the shape and dtype of each gradient.
        buckets: List with the positions of the gradients in each bucket. The
            last variables come first, because their gradients do.
        is_early: Boolean, whether buckets may be sent before all gradients
            are computed.
    """

    def __init__(self, variables: Sequence[keras.Variable], limit: int) -> None:
        self.likes = [
            (tuple(v.shape), getattr(torch, str(v.dtype))) for v in variables
        ]
        self.buckets = [
            [position for position, _ in group]
            for _, group in itertools.groupby(
                self._numbered(limit), key=lambda pair: pair[1]
            )
        ]
        self.is_early = True
        for position, variable in enumerate(variables):
            setattr(variable, _PLACE, (self, position))

    def _numbered(self, limit: int) -> list[tuple[int, int]]:
        """Returns pairs of a position, the last first, and its bucket."""
        found: list[tuple[int, int]] = []
        number = size = 0
        before = None
        for position in reversed(range(len(self.likes))):
            shape, dtype = self.likes[position]
            own = torch.Size(shape).numel() * dtype.itemsize
            if found and (dtype != before or size + own > limit):
                number, size = number + 1, 0
            found.append((position, number))
            size, before = size + own, dtype
        return found

    def is_of(self, variables: Sequence[keras.Variable]) -> bool:
        """Returns whether the order was made for these variables."""
        return len(self.likes) == len(variables) and all(
            vars(variable).get(_PLACE) == (self, position)
            for position, variable in enumerate(variables)
        )


class Bucket:
    """Gradients whose sum over workers is in progress.

    The summed tensor holds the gradients, zeros where this worker has none,
    and after them a 1 for each gradient that it has and a 0 for the others.

    Args:
        likes: Sequence of the gradients' shapes and dtypes; one dtype.
        gradients: Sequence of tensors, `None` where this worker has none.
        device: `torch.device` of the sum.
        workers: `TorchWorkers`.
        flag: Boolean, summed as the last element.
    """

    def __init__(
        self,
        likes: Sequence[tuple[tuple[int, ...], torch.dtype]],
        gradients: Sequence[torch.Tensor | None],
        device: torch.device,
        workers: TorchWorkers,
        flag: bool = False,
    ) -> None:
        self._likes = likes
        dtype = likes[0][1]
        flags = [float(g is not None) for g in gradients] + [float(flag)]
        parts = [
            torch.zeros(torch.Size(shape).numel(), dtype=dtype, device=device)
            if gradient is None
            else gradient.detach().reshape(-1).to(dtype)
            for gradient, (shape, _) in zip(gradients, likes, strict=True)
        ]
        flat = torch.cat([*parts, torch.tensor(flags, device=device).to(dtype)])
        wire = workers.options.dtype
        if wire is not None and dtype == torch.float32:
            flat = flat.to(getattr(torch, wire))
        self._flat = flat
        self._wait: Callable[[], None] = workers.start_sum(flat)

    def finish(self) -> tuple[list[torch.Tensor | None], bool]:
        """Waits for the sums, `None` where no worker has a gradient.

        The second result is true if any worker's flag is set.
        """
        self._wait()
        sizes = [torch.Size(shape).numel() for shape, _ in self._likes]
        *parts, flags = self._flat.split([*sizes, len(sizes) + 1])
        *present, flag = flags.tolist()
        return [
            part.reshape(shape).to(dtype) if count else None
            for part, (shape, dtype), count in zip(
                parts, self._likes, present, strict=True
            )
        ], bool(flag)


class Overlap:
    """Sums gradients over workers while the backward pass still runs.

    Buckets are sent in the same order on every worker, each as soon as all
    local replicas have its gradients; the last one is sent with the update.
    The optimizer may then be given other gradients, such as the sum of two
    passes, and maybe on one worker only. The flag of the last bucket tells
    all workers. They send all buckets again then, and none early any more.

    Args:
        workers: `TorchWorkers`.
        device: `torch.device` of the sums.
        weights: Sequence with the weight of each replica that takes part.
    """

    def __init__(
        self,
        workers: TorchWorkers,
        device: torch.device,
        weights: Sequence[float] = (),
    ) -> None:
        self._workers = workers
        self._device = device
        self._weights = list(weights)
        # By order, position and replica: the gradient, and its version.
        self._ready: dict[Order, dict[int, dict[int, tuple[Any, int]]]] = {}
        self._sent: dict[Order, list[Bucket]] = {}

    def watch(self, variable: Any, leaf: torch.Tensor, replica: int) -> None:
        """Sends a variable's bucket early, once its gradients are there.

        Args:
            variable: The `keras.Variable`.
            leaf: Tensor with which the replica reads it.
            replica: Integer, position among the replicas that take part.
        """
        order, position = vars(variable).get(_PLACE, (None, 0))
        if order is None or not order.is_early or len(order.buckets) == 1:
            return

        def arrived(leaf: torch.Tensor) -> None:
            self._arrived(order, position, replica, leaf.grad)

        after_accumulation(leaf, arrived)

    def sum(
        self,
        gradients: Sequence[Sequence[Any]],
        own: list[Any],
        variables: Sequence[keras.Variable],
    ) -> list[Any]:
        """Sums gradients over workers, using buckets sent already.

        Args:
            gradients: For each replica that takes part, its gradients.
            own: List with their weighted sums, `None` for variables without.
            variables: Sequence of the gradients' variables.

        Returns:
            List like `own`, `None` where no worker has a gradient.
        """
        if not variables:
            return own
        order, _ = vars(variables[0]).get(_PLACE, (None, 0))
        if order is None or not order.is_of(variables):
            limit = self._workers.options.bytes_per_pack or BUCKET_BYTES
            order = Order(variables, limit)
        sent = self._sent.pop(order, [])
        is_stale = bool(sent) and not self._is_same(order, gradients)
        self._ready.pop(order, None)
        rest = order.buckets[len(sent) : -1]
        started = sent + [self._bucket(order, each, own) for each in rest]
        last = self._bucket(order, order.buckets[-1], own, is_stale)
        finished = [bucket.finish()[0] for bucket in started]
        totals, anyone_is_stale = last.finish()
        if anyone_is_stale:
            order.is_early = False
            again = [self._bucket(order, b, own) for b in order.buckets[:-1]]
            finished = [bucket.finish()[0] for bucket in again]
        summed = list(own)
        for positions, values in zip(
            order.buckets, [*finished, totals], strict=True
        ):
            for position, value in zip(positions, values, strict=True):
                summed[position] = value
        return summed

    def close(self) -> None:
        """Waits for buckets that were sent early and not asked for."""
        for buckets in self._sent.values():
            for bucket in buckets:
                bucket.finish()
        self._sent.clear()
        self._ready.clear()

    def _bucket(
        self,
        order: Order,
        positions: Sequence[int],
        own: Sequence[Any],
        flag: bool = False,
    ) -> Bucket:
        likes = [order.likes[position] for position in positions]
        chosen = [own[position] for position in positions]
        return Bucket(likes, chosen, self._device, self._workers, flag)

    def _arrived(
        self, order: Order, position: int, replica: int, gradient: Any
    ) -> None:
        ready = self._ready.setdefault(order, {})
        own = (gradient, gradient._version)
        # Only the first one of each replica: that is what is sent.
        ready.setdefault(position, {}).setdefault(replica, own)
        sent = self._sent.setdefault(order, [])
        while len(sent) < len(order.buckets) - 1:
            positions = order.buckets[len(sent)]
            if any(
                len(ready.get(p, ())) < len(self._weights) for p in positions
            ):
                return
            with torch.no_grad():
                sums = {p: self._weighted(ready[p]) for p in positions}
                likes = [order.likes[p] for p in positions]
                sent.append(
                    Bucket(
                        likes,
                        [sums[p] for p in positions],
                        self._device,
                        self._workers,
                    )
                )

    def _weighted(self, by_replica: dict[int, tuple[Any, int]]) -> Any:
        total = None
        for replica, weight in enumerate(self._weights):
            gradient, _ = by_replica[replica]
            term = weighted(gradient.to(self._device), weight)
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
    """Multiplies a gradient by a weight; weight 0 gives zeros even for NaN."""
    return gradient * weight if weight else torch.zeros_like(gradient)
