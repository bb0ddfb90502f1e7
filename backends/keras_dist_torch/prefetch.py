"""Batches that are copied to a GPU while it computes a step.

A copy from ordinary memory makes the program wait for all that the GPU has to
do. So batches are read on the host, copied to pinned memory, and sent from
there; for one device, by a stream and, where nobody can tell, a thread of
their own. Small batches are left to Keras: a thread that shares Python's lock
with the step takes longer than their copies do.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import torch

from keras_dist.plugins import Executor
from keras_dist.plugins import as_hook
from keras_dist.plugins import map_nest
from keras_dist.plugins import replaced
from keras_dist_torch.keras_internals import arrays_in

# Starts to copy a batch; the result gives the copy to the GPU's next step.
Send = Callable[[Any], Callable[[], Any]]


# Batches of arrays with fewer numbers are small.
LEAST_SIZE = 2**20


class _Now(threading.local):
    def __init__(self) -> None:
        # Makes what sends the batches of one pass.
        self.make: Callable[[], Send] | None = None
        self.ahead = 0
        self.least = 0


_now = _Now()


@contextlib.contextmanager
def to_gpu(device: torch.device, executor: Executor) -> Iterator[None]:
    """Has trainers send batches to a GPU, while it computes, inside."""
    if device.type == "cpu":
        yield
        return

    def make() -> Send:
        return Lane(device).send

    ahead = executor.batches_ahead
    with replaced(_now, make=make, ahead=ahead, least=LEAST_SIZE):
        yield


@contextlib.contextmanager
def from_host() -> Iterator[None]:
    """Has trainers read batches on the host, which steps send, inside."""
    with replaced(_now, make=lambda: _as_it_is, ahead=0, least=0):
        yield


def _as_it_is(batch: object) -> Callable[[], Any]:
    return lambda: batch


@as_hook
def hook_batches(original: Callable[..., Any], self: Any, /) -> Any:
    """Stands for the method by which a trainer gets its batches.

    Arrays that are on a GPU already are not sent.
    """
    batches = original(self)
    if _now.make is None:
        return batches
    arrays, size = arrays_in(self)
    if any(isinstance(a, torch.Tensor) and a.is_cuda for a in arrays):
        return batches
    if size is not None and size < _now.least:
        return batches
    return sent_ahead(batches, _now.make(), 0 if size is None else _now.ahead)


class Lane:
    """A stream that copies batches to a GPU, in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, batch: object) -> Callable[[], Any]:
        with torch.cuda.stream(self._stream):
            copy = map_nest(self._sent, batch)
            done = self._stream.record_event()

        def arrive() -> Any:
            # The GPU waits, and not the program.
            step = torch.cuda.current_stream(self._device)
            step.wait_event(done)
            map_nest(lambda leaf: _is_used_by(step, leaf), copy)
            return copy

        return arrive

    def _sent(self, leaf: object) -> Any:
        is_tensor = isinstance(leaf, torch.Tensor)
        return sent(leaf, self._device) if is_tensor else leaf


def _is_used_by(stream: torch.cuda.Stream, leaf: object) -> None:
    """Keeps a tensor's memory until the stream has done what it has now."""
    if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
        leaf.record_stream(stream)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor on a device; the program does not wait for a GPU."""
    is_here = tensor.device.type == "cpu"
    # A copy in pinned memory would have no gradients.
    if device.type == "cpu" or not is_here or tensor.requires_grad:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def sent_ahead(batches: Iterable[Any], send: Send, ahead: int) -> Iterator[Any]:
    """Yields batches that were sent; the next ones are under way by then.

    What is read ahead is read and sent by a thread.
    """
    reading = iter(batches)

    def read() -> Any:
        with keras.device("cpu"):
            batch = next(reading, _END)
        return _END if batch is _END else send(batch)

    if not ahead:
        while (arrive := read()) is not _END:
            yield arrive()
        return
    pool = ThreadPoolExecutor(1, "keras_dist_reader")
    try:
        under_way = deque(pool.submit(read) for _ in range(ahead))
        while True:
            under_way.append(pool.submit(read))
            # An error is raised where its batch would be yielded.
            arrive = under_way.popleft().result()
            if arrive is _END:
                return
            yield arrive()
    finally:
        pool.shutdown(cancel_futures=True)


_END = object()
