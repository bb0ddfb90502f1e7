"""Buckets of gradients, each summed over workers in one collective."""

import hashlib
import itertools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import Self

import keras
import torch

from keras_dist.plugins import Body
from keras_dist.plugins import Call
from keras_dist.plugins import CommunicationOptions
from keras_dist.plugins import in_packs
from keras_dist.plugins import packs
from keras_dist_torch.flat import numbers_on
from keras_dist_torch.flat import scalars_on
from keras_dist_torch.flat import split_as
from keras_dist_torch.gradients import after_accumulation
from keras_dist_torch.gradients import weighted_sum
from keras_dist_torch.record import TorchRecord
from keras_dist_torch.sums import Part
from keras_dist_torch.sums import Start
from keras_dist_torch.sums import Sum
from keras_dist_torch.workers import TorchWorkers

# Bytes of a bucket, unless options set them.
BUCKET_BYTES = 25 * 2**20


class Order:
    """The assignment of an optimizer's gradients to buckets, last first."""

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        options: CommunicationOptions,
    ) -> None:
        self.likes = [
            (torch.Size(v.shape), getattr(torch, str(v.dtype)))
            for v in variables
        ]
        self.buckets = packs(
            [dtype for _, dtype in self.likes],
            [shape.numel() * dtype.itemsize for shape, dtype in self.likes],
            options.bytes_per_pack or BUCKET_BYTES,
            last_first=True,
        )
        # As they are complete, where variables have several dtypes.
        self.buckets.sort(key=min, reverse=True)
        shapes = repr((self.likes, self.buckets))
        code = hashlib.blake2b(shapes.encode(), digest_size=4).hexdigest()
        self.layout = f"{len(variables)} tensors {code}"
        # Whether buckets may be sent before all gradients are there.
        self.is_early = True
        wire = options.dtype
        self.early = tuple(self._part_of(b, wire) for b in self.buckets[:-1])
        for position, variable in enumerate(variables):
            TorchRecord.of(variable).order = self, position

    def _part_of(self, positions: Sequence[int], wire: str | None) -> Part:
        """Describes the message for a bucket that is not the last."""
        likes = [self.likes[position] for position in positions]
        size = sum(shape.numel() for shape, _ in likes) + len(likes) + 2
        dtype = likes[0][1]
        if wire is not None and dtype == torch.float32:
            dtype = getattr(torch, wire)
        return size, dtype

    def is_of(self, variables: Sequence[keras.Variable]) -> bool:
        places = [TorchRecord.of(variable).order for variable in variables]
        return places == [(self, i) for i in range(len(self.likes))]


def order_of(
    variables: Sequence[keras.Variable], options: CommunicationOptions
) -> Order:
    """Returns the order of some variables, always the same."""
    order: Order | None = TorchRecord.of(variables[0]).order[0]
    if order is None or not order.is_of(variables):
        order = Order(variables, options)
    return order


class Bucket:
    """Gradients of one dtype, to be summed over workers with weights.

    After them the sum has a 1 for each that is not `None`, then the flag, then
    numbers, which have their weights, and at last the flag of `ExpectedSums`.
    """

    def __init__(
        self, order: Order, positions: Sequence[int], flat: torch.Tensor
    ) -> None:
        self._likes = [order.likes[position] for position in positions]
        self.flat = flat
        self._wait: Callable[[], None] = lambda: None
        # When it is finished, what workers have added: which gradients there
        # are, whether any has set the flag, and how many are at something else.
        self.present: list[float] = []
        self.is_flagged, self.guard = False, 0.0

    @classmethod
    def of(
        cls,
        order: Order,
        positions: Sequence[int],
        gradients: Sequence[torch.Tensor | None],
        weight: float,
        device: torch.device,
        workers: TorchWorkers,
        flag: bool = False,
        numbers: Sequence[Any] = (),
        out: torch.Tensor | None = None,
    ) -> Self:
        likes = [order.likes[position] for position in positions]
        dtype = likes[0][1]
        flags = [float(g is not None) for g in gradients] + [float(flag)]
        parts = [
            torch.zeros(shape.numel(), dtype=dtype, device=device)
            if gradient is None
            else gradient.detach().reshape(-1).to(device, dtype)
            for gradient, (shape, _) in zip(gradients, likes, strict=True)
        ]
        size = sum(map(torch.Tensor.numel, parts))
        parts.append(numbers_on(device, flags).to(dtype))
        end = torch.zeros(1, dtype=dtype, device=device)
        parts += [*scalars_on(device, numbers), end]
        flat = torch.cat(parts, out=out)
        if not weight:  # drops a gradient even if it is NaN
            flat[:size].zero_()
        elif weight != 1:
            flat[:size].mul_(weight)
        wire = workers.options.dtype
        if wire is not None and dtype == torch.float32:
            flat = flat.to(getattr(torch, wire))
        return cls(order, positions, flat)

    def start(self, start: Start) -> Self:
        """Begins to sum it."""
        self._wait = start(self.flat)
        return self

    def swap(self, workers: TorchWorkers, call: Call) -> Self:
        """Sums it by an exchange, as it is small."""
        data = self.flat.cpu().view(torch.uint8).numpy().tobytes()
        body = Body(len(data), lambda: data)
        _, bodies = workers.exchange(call, b"", body)
        assert bodies is not None
        rows = torch.frombuffer(
            bytearray(b"".join(bodies)), dtype=self.flat.dtype
        )
        total = rows.reshape(len(bodies), -1).sum(0, dtype=rows.dtype)
        self.flat = total.to(self.flat.device)
        return self

    def finish(self) -> Self:
        """Waits for its sum."""
        self._wait()
        size = sum([shape.numel() for shape, _ in self._likes])
        count = len(self._likes)
        numbers = self.flat[size:].tolist()
        self.present = numbers[:count]
        self.is_flagged, self.guard = bool(numbers[count]), numbers[-1]
        return self

    def taken_apart(
        self,
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
        """Returns sums of gradients, some `None`, and those of numbers."""
        shapes, (dtype, *_) = zip(*self._likes, strict=True)
        *parts, last = split_as(self.flat, shapes)
        sums = [
            part.to(dtype) if is_there else None
            for part, is_there in zip(parts, self.present, strict=True)
        ]
        return sums, [*last[len(shapes) + 1 : -1].unbind()]


def carries_numbers(variables: Sequence[keras.Variable]) -> bool:
    """Returns whether the last bucket of gradients can carry numbers."""
    return bool(variables) and str(variables[0].dtype) == "float32"


class Overlap:
    """Sums gradients over workers while the backward pass still runs.

    A bucket is sent once all local replicas have it, in one order everywhere.
    The optimizer may be given other gradients than those sent, maybe on one
    worker only. By the last bucket's flag all know, and send everything again.
    """

    def __init__(
        self,
        workers: TorchWorkers,
        device: torch.device,
        weights: Sequence[float] = (),
    ) -> None:
        self._workers = workers
        self._device = device
        self._weights = weights
        # By order, position and replica: the gradient, and its version.
        self._ready: dict[Order, dict[int, dict[int, tuple[Any, int]]]] = {}
        self._sent: dict[Order, list[Bucket]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        sent, self._sent = self._sent, {}
        self._ready.clear()
        # After an error, other workers may not have sent theirs.
        if kind is None:
            for bucket in itertools.chain(*sent.values()):
                bucket.finish()

    def watch(
        self, variable: keras.Variable, leaf: torch.Tensor, replica: int
    ) -> None:
        """Sends a variable's bucket once replicas' leaves have gradients."""
        order, position = TorchRecord.of(variable).order
        if order is None or not order.is_early or len(order.buckets) == 1:
            return

        def arrived(leaf: torch.Tensor) -> None:
            self._arrived(order, position, replica, leaf.grad)

        after_accumulation(leaf, arrived)

    def sum(
        self,
        gradients: Sequence[Sequence[Any]],
        here: Sequence[Sequence[Any]],
        weights: Sequence[float],
        variables: Sequence[keras.Variable],
        numbers: Sequence[Any] = (),
    ) -> list[Any]:
        """Sums each replica's gradients, which `here` has on one device, and
        then numbers of this worker, which travel with the last ones."""
        if not variables:
            return []
        local_sums, weight = self._local_sum(here, weights)
        order = order_of(variables, self._workers.options)
        sent = self._sent.pop(order, [])
        is_stale = bool(sent) and not self._is_same(order, gradients)
        self._ready.pop(order, None)

        def made(positions: list[int], *last: Any) -> Bucket:
            chosen = [local_sums[position] for position in positions]
            return Bucket.of(
                order, positions, chosen, weight, self._device, workers, *last
            )

        workers = self._workers
        final = made(order.buckets[-1], is_stale, numbers)
        finished = self.finished(order, made, final, len(numbers), sent)
        apart = [bucket.taken_apart() for bucket in finished]
        summed = iter([sums for sums, _ in apart])
        sums = in_packs(lambda _: next(summed), order.buckets, local_sums)
        return [*sums, *apart[-1][1]]

    def finished(
        self,
        order: Order,
        made: Callable[[list[int]], Bucket],
        final: Bucket,
        num_numbers: int,
        sent: Sequence[Bucket] = (),
    ) -> list[Bucket]:
        """Sums buckets: early ones that `made` makes of positions, if they are
        not sent yet, and the final one."""
        workers, early = self._workers, order.buckets[:-1]
        layout = f"{order.layout} and {num_numbers} numbers"
        call = workers.call("gradients", layout)
        if not early and workers.is_small(final.flat.nbytes):
            return [final.swap(workers, call).finish()]
        whole = Sum(
            call,
            order.layout,
            order.early,
            (final.flat.numel(), final.flat.dtype),
        )
        if sent and workers.sums.expected != whole:
            for bucket in sent:
                bucket.finish()
            sent = []
        workers.agree(whole)
        missing = early[len(sent) :]
        start = workers.start_sum
        begun = [*sent, *(made(p).start(start) for p in missing)]
        done = [bucket.finish() for bucket in (*begun, final.start(start))]
        workers.end_sum(whole, done[-1].guard)
        if done[-1].is_flagged:
            order.is_early = False
            again = [made(positions).start(start) for positions in early]
            done = [*(bucket.finish() for bucket in again), done[-1]]
        return done

    def _arrived(
        self, order: Order, position: int, replica: int, gradient: torch.Tensor
    ) -> None:
        ready = self._ready.setdefault(order, {})
        entry = (gradient, gradient._version)
        # Only the first one of each replica: that is what is sent.
        ready.setdefault(position, {}).setdefault(replica, entry)
        expected = self._workers.sums.expected
        if expected is None or expected.order != order.layout:
            return
        sent = self._sent.setdefault(order, [])
        count = len(self._weights)
        for positions in order.buckets[len(sent) : -1]:
            if any(len(ready.get(p, ())) < count for p in positions):
                return
            with torch.no_grad():
                sums, weight = self._local_sum(
                    [[ready[p][i][0] for p in positions] for i in range(count)],
                    self._weights,
                )
                bucket = Bucket.of(
                    order, positions, sums, weight, self._device, self._workers
                )
                sent.append(bucket.start(self._workers.sums.send_early))

    def _local_sum(
        self, gradients: Sequence[Sequence[Any]], weights: Sequence[float]
    ) -> tuple[Sequence[Any], float]:
        """Returns replicas' gradients in one list, and a weight for it.

        One replica's are weighted in the bucket, which saves a copy of them.
        """
        if len(gradients) == 1:
            return gradients[0], weights[0]
        return weighted_sum(gradients, weights, self._device), 1.0

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
