"""Workers: the exchanges of values between the workers of a cluster."""

import contextlib
import functools
import weakref
from abc import ABC
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist.core import context
from keras_dist.core.nests import leaves_of
from keras_dist.core.nests import map_nest
from keras_dist.core.options import CommunicationOptions
from keras_dist.core.plan import Cluster
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.reduction import combine
from keras_dist.core.rows import OwnRows
from keras_dist.core.rows import RowShard
from keras_dist.errors import ClusterError
from keras_dist.plugin.bodies import NO_BODY
from keras_dist.plugin.bodies import Body
from keras_dist.plugin.bodies import Like
from keras_dist.plugin.bodies import values_of
from keras_dist.plugin.chief_only import check_all_come
from keras_dist.plugin.frames import frame_size
from keras_dist.plugin.frames import packed
from keras_dist.plugin.frames import room
from keras_dist.plugin.frames import unpacked
from keras_dist.plugin.messages import Messages
from keras_dist.plugin.messages import could_not
from keras_dist.plugin.recorder import Call
from keras_dist.plugin.recorder import FlightRecorder
from keras_dist.plugin.recorder import apart
from keras_dist.plugin.recorder import where

# Characters of a layout in errors.
_LONG = 60
_EXCHANGE = "An exchange of values, such as `strategy.reduce`,"


class _Step(contextlib.AbstractContextManager[None]):
    """A step of `fit`: a class, because each batch has one."""

    def __init__(self, workers: "Workers", what: str) -> None:
        self._workers, self._call = workers, Call(what, what)

    def __enter__(self) -> None:
        self._before = self._workers.in_step
        self._workers.in_step = self._call.text
        self._workers.recorder.note(self._call)

    def __exit__(self, *error: object) -> None:
        self._workers.in_step = self._before


class Workers(ABC):
    """The exchanges of values between workers, made by all in one order.

    One thread at a time makes them. Each begins with frames, by which workers
    find out that they are at different ones: that is an error on all of them.
    Results are on the primary device.
    """

    # `None` where programs are compiled for workers that are not here.
    messages: Messages | None = None

    def __init__(self, cluster: Cluster, options: CommunicationOptions) -> None:
        self.cluster = cluster
        self.options = options
        self.recorder = FlightRecorder()
        self._frame_size = frame_size(cluster.num_workers)
        self._room = room(self._frame_size)
        # Variables that were assigned outside of `run` and `fit` since workers
        # have compared any, by id; and how many of these calls are open.
        self.assigned: dict[int, keras.Variable] = {}
        self._num_open = 0
        # The functions of `run` that workers have compared, and how often those
        # of the same code.
        self.compared: weakref.WeakSet[Any] = weakref.WeakSet()
        self.num_compared: Counter[Any] = Counter()
        # What kind of step runs, in which replicas of any number exchange.
        self.in_step = ""
        # How many variables have got the chief's values.
        self.num_taken = 0
        # What is compared of an exchange besides its values.
        self.in_call = ""

    def check_same(
        self, cluster: Cluster, options: CommunicationOptions
    ) -> None:
        """Raises `ClusterError` for another cluster or other options."""
        if options not in (self.options, CommunicationOptions()):
            raise ClusterError(
                "A process connects to the other workers only once, with the "
                f"options of its first strategy.\nReceived: {options}. "
                f"Expected: {self.options}. Pass the same "
                "`communication_options` to all strategies."
            )
        if cluster != self.cluster:
            raise ClusterError(
                "A process belongs to one cluster until it ends.\nReceived: "
                f"{cluster}. Expected: {self.cluster}. Make all strategies "
                "with the same cluster resolver."
            )

    @abstractmethod
    def swap(self, data: np.ndarray) -> np.ndarray:
        """Sends bytes, as many from each worker, to all.

        Args:
            data: Array of shape `(bytes,)` and dtype uint8.

        Returns:
            Array of shape `(workers, bytes)`.
        """

    # The following three may be replaced by the framework's own collectives.
    # They get tensors that have the same dtypes and shapes on each worker.

    def sum_alike(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums large tensors over the workers, in few collectives."""
        columns = zip(*self.gather_alike(tensors), strict=True)
        return [sum(column[1:], column[0]) for column in columns]

    def gather_alike(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """Returns every worker's large tensors, in order."""
        likes = [Like.of(tensor) for tensor in tensors]
        data = self._body(tensors, likes).read()
        rows = self.swap(np.frombuffer(data, np.uint8))
        return [
            [self.here(value) for value in values_of(row.tobytes(), likes)]
            for row in rows
        ]

    def broadcast_alike(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the chief's large tensors."""
        return self.gather_alike(tensors)[0]

    def on_host(self, tensor: object) -> np.ndarray:
        """Returns a tensor as an array of NumPy, of its dtype and shape."""
        return np.asarray(ops.convert_to_numpy(tensor))

    def here(self, value: np.ndarray) -> Any:
        """Returns an array of NumPy as a tensor on the primary device."""
        return ops.convert_to_tensor(value)

    def sum(self, tensors: Sequence[Any], *, what: str = "a sum") -> list[Any]:
        """Sums each tensor over the workers, in few collectives.

        `what` says what the sum is for, which workers compare.
        """
        if not tensors:
            return []
        everyone = self._everyones(what, tensors)
        if everyone is None:
            return self.sum_alike(tensors)
        return self._totals(everyone)

    def _totals(self, everyone: Sequence[Sequence[np.ndarray]]) -> list[Any]:
        columns = zip(*everyone, strict=True)
        return [self.here(_total(column)) for column in columns]

    def gather(
        self, tensors: Sequence[Any], *, what: str = "a gather"
    ) -> list[list[Any]]:
        """Returns every worker's tensors, of the same shapes, in order.

        `what` says what they are for, which workers compare.
        """
        everyone = self._everyones(what, tensors)
        if everyone is None:
            return self.gather_alike(tensors)
        return [[self.here(value) for value in arrays] for arrays in everyone]

    def broadcast(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the chief's tensors; shapes are the same on each worker."""
        if not tensors:
            return []
        everyone = self._everyones("a broadcast", tensors)
        if everyone is None:
            return self.broadcast_alike(tensors)
        return [self.here(value) for value in everyone[0]]

    def gather_rows(
        self, tensors: Sequence[Any], shares: Sequence[RowShard]
    ) -> list[list[Any]]:
        """Gathers tensors of any size along axis 0.

        Shares are hints for programs that can't ask for sizes."""
        return self._rows("a gather of rows", tensors)

    def whole_batch(
        self, batch: object, shares_of: Callable[[int], Sequence[range]]
    ) -> Any:
        """Gathers a batch of which each worker has loaded its own rows.

        `shares_of` gives the rows of this worker's replicas by those of all.
        """
        leaves = leaves_of(batch)
        leaves = [leaf for leaf in leaves if isinstance(leaf, OwnRows)]
        if not leaves:
            return batch
        mine = [share for share in shares_of(len(leaves[0])) if share]
        # A worker that computes nothing has a row of another's.
        part = slice(mine[0].start, mine[-1].stop) if mine else slice(0)
        rows = [ops.convert_to_tensor(leaf[part]) for leaf in leaves]
        columns = zip(*self._rows("a batch", rows), strict=True)
        joined = iter([ops.concatenate(column, axis=0) for column in columns])
        return map_nest(
            lambda leaf: next(joined) if isinstance(leaf, OwnRows) else leaf,
            batch,
        )

    def _rows(self, what: str, tensors: Sequence[Any]) -> list[list[Any]]:
        likes = [Like.of(tensor) for tensor in tensors]
        rows = np.array([like.rows for like in likes], np.int64)
        layout = ", ".join(like.of_any_rows for like in likes)
        call = self.call(what, layout)
        heads, bodies = self.exchange(
            call, rows.tobytes(), self._body(tensors, likes)
        )
        sizes = [np.frombuffer(head, np.int64).tolist() for head in heads]
        if bodies is not None:
            return [
                [self.here(v) for v in values_of(body, likes, counts)]
                for body, counts in zip(bodies, sizes, strict=True)
            ]
        most = [max(column) for column in zip(*sizes, strict=True)]
        padded = [_with_rows(t, n) for t, n in zip(tensors, most, strict=True)]
        return [
            [
                v if n < 0 else v[:n]
                for v, n in zip(gathered, counts, strict=True)
            ]
            for gathered, counts in zip(
                self.gather_alike(padded), sizes, strict=True
            )
        ]

    def concatenate(self, tensor: object, axis: int) -> Any:
        """Concatenates the workers' tensors, which may differ along `axis`."""
        moved = tensor if axis == 0 else ops.moveaxis(tensor, axis, 0)
        everyone = self._rows(f"a gather along axis {axis}", [moved])
        joined = ops.concatenate([tensors[0] for tensors in everyone], axis=0)
        return joined if axis == 0 else ops.moveaxis(joined, 0, axis)

    def concatenate_numbers(
        self, numbers: Sequence[Any], what: str = "a comparison"
    ) -> list[Any]:
        """Returns the integers of all workers, in order."""
        local_numbers = np.array([int(number) for number in numbers], np.int64)
        layout = f"{local_numbers.size} integers"
        bodies = self.swap_bytes(what, layout, local_numbers.tobytes())
        return list(map(int, np.frombuffer(b"".join(bodies), np.int64)))

    def texts(self, text: str) -> list[str]:
        """Returns the texts of all workers; lengths may differ."""
        bodies = self.swap_bytes("texts", "of any length", text.encode())
        return [body.decode() for body in bodies]

    def chiefs_text(self, text: str) -> str:
        """Returns the chief's text on every worker; lengths may differ."""
        sent = text if self.cluster.is_chief else ""
        return self.texts(sent)[0]

    def barrier(self, what: str, layout: str = "") -> None:
        """Waits for all workers, which have to come for the same."""
        self.swap_bytes(what, layout, b"")

    def swap_bytes(self, what: str, layout: str, data: bytes) -> list[bytes]:
        """Returns the bytes of all workers; sizes may differ."""
        heads, _ = self.exchange(self.call(what, layout), data)
        return heads

    def exchange(
        self, call: Call, head: bytes, body: Body = NO_BODY
    ) -> tuple[list[bytes], list[bytes] | None]:
        """Sends a head, and a body if all are small, to all workers.

        Args:
            call: `Call`, the same on all workers.
            head: Bytes, of any size.
            body: `Body`, of any size, read only if it is small.

        Returns:
            Tuple of the workers' heads, and their bodies, or `None` if one
            of these is too large for a frame.

        Raises:
            ReplicaDivergenceError: If workers are at different calls, or if
                only the chief runs this code.
        """
        check_all_come(_EXCHANGE)
        before = self.recorder.last
        entry = self.recorder.note(call)
        small = body.read() if self.is_small(len(head) + body.size) else b""
        local_frame = packed(
            self._frame_size, entry, before, head, small, len(head) + body.size
        )
        frames = [unpacked(row) for row in self.swap(local_frame)]
        if any(frame.code != entry.code for frame in frames):
            self.forget_calls()
            raise apart([(frame.text, frame.before) for frame in frames])
        sizes = [frame.head_size for frame in frames]
        if not self.is_small(max(sizes)):
            return self._large(head, sizes), None
        heads = [frame.content[: frame.head_size] for frame in frames]
        if not self.is_small(max(frame.size for frame in frames)):
            return heads, None
        return heads, [f.content[f.head_size : f.size] for f in frames]

    def is_small(self, size: int) -> bool:
        """Returns whether so many bytes travel in a frame."""
        return size <= self._room

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Makes assignments inside those of `run` or `fit`."""
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    @property
    def is_open(self) -> bool:
        """Returns whether `run` or `fit` is under way."""
        return self._num_open > 0

    @property
    def is_tracing(self) -> bool:
        """Returns whether this thread makes a program, without values."""
        return context.inlines()

    def note_assigned(self, variable: keras.Variable) -> None:
        """Notes an assignment, for workers to compare at the next `run`."""
        if not self._num_open:
            self.assigned[id(variable)] = variable

    def forget_calls(self) -> None:
        """Begins anew after an error of which all workers know."""
        self.recorder.begin_again()

    def call(self, what: str, layout: str) -> Call:
        """Returns a call of the user's code for values of a layout."""
        key, text = (self.in_step,) * 2 if self.in_step else where()
        what = f"{what}{self.in_call}"
        if not layout:
            return Call(f"{what}, {key}", f"{what}, {text}")
        short = layout if len(layout) <= _LONG else f"{layout[:_LONG]}..."
        return Call(f"{what} ({layout}), {key}", f"{what} ({short}), {text}")

    @contextlib.contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Has exchanges inside compared by these words, too."""
        if self.is_tracing:
            context.note_exchange(what)
        before, self.in_call = self.in_call, f" for {what}"
        try:
            yield
        finally:
            self.in_call = before

    def compare_program(self, described: str) -> None:
        """Raises an error if workers' programs exchange other values.

        All workers call it, before they run such a program first."""
        self.exchange(Call(described, described), b"")

    def step(self, what: str) -> "_Step":
        """Returns the context of a step of `fit`, which is recorded.

        Exchanges inside have no other place."""
        return _Step(self, what)

    def _large(self, head: bytes, sizes: Sequence[int]) -> list[bytes]:
        padded = np.zeros(max(sizes), np.uint8)
        padded[: len(head)] = np.frombuffer(head, np.uint8)
        rows = self.swap(padded)
        return [
            row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)
        ]

    def _everyones(
        self, what: str, tensors: Sequence[Any]
    ) -> list[list[np.ndarray]] | None:
        """Returns all workers' tensors of the same shapes, `None` if large."""
        likes = [Like.of(tensor) for tensor in tensors]
        call = self.call(what, ", ".join(map(str, likes)))
        _, bodies = self.exchange(call, b"", self._body(tensors, likes))
        if bodies is None:
            return None
        return [values_of(body, likes) for body in bodies]

    def _body(self, tensors: Sequence[Any], likes: Sequence[Like]) -> Body:
        return Body(
            sum(like.nbytes for like in likes),
            lambda: b"".join(self.on_host(t).tobytes() for t in tensors),
        )

    def check_all(self, error: Exception | None, what: str) -> None:
        """Raises an error of this worker, or a `ClusterError` for one of
        another worker, if any had one when it did the same."""
        failed = self.concatenate_numbers([int(error is not None)])
        if error is not None:
            raise error
        if any(failed):
            raise could_not(failed.index(1), what)

    def do_all(
        self,
        name: str,
        what: str,
        fn: Callable[[], str],
        in_background: bool = False,
    ) -> list[str]:
        """Calls a function on each worker, and returns all results on all.

        A thread in the background takes no collective for it; elsewhere, a
        collective shows sooner that a worker is lost. A name is used once."""
        assert self.messages is not None

        def checked() -> str:
            text, failure = "", None
            try:
                text = fn()
            except Exception as error:
                failure = error
            self.check_all(failure, what)
            return text

        return self.messages.exchange(
            name, what, fn if in_background else checked
        )

    def explain(self, error: BaseException) -> BaseException:
        """Returns the `WorkerLostError` that caused an error, else the
        error."""
        return error

    def leave(self, reason: str, failed: bool) -> None:
        """Leaves the cluster; a process that `failed` does not wait for
        others."""

    def combine(
        self, op: ReduceOp, values: Sequence[Any], num_replicas: int
    ) -> list[Any]:
        """Combines the workers' partial results; for `MEAN`, these are sums."""
        if op is ReduceOp.SUM:
            return self.sum(values)
        if op is ReduceOp.MEAN:
            totals = self.sum(values, what="a mean")
            return [ops.true_divide(total, num_replicas) for total in totals]
        everyone = self.gather(values, what=f"a reduction by {op.name}")
        return [combine(op, column) for column in zip(*everyone, strict=True)]


def raise_explained(error: BaseException, workers: Workers | None) -> None:
    """Raises `WorkerLostError` if a lost worker is the cause of an error."""
    if workers is None or not isinstance(error, Exception):
        return
    explained = workers.explain(error)
    if explained is not error:
        raise explained from error


def _total(values: Sequence[np.ndarray]) -> np.ndarray:
    """Sums arrays in the order of workers, in their own dtype."""
    first = values[0]
    return np.asarray(functools.reduce(np.add, values), first.dtype)


def total_of(op: ReduceOp) -> ReduceOp:
    """Returns the operation within a worker for `op`: `SUM` for `MEAN`."""
    return ReduceOp.SUM if op is ReduceOp.MEAN else op


def _with_rows(tensor: Any, rows: int) -> Any:
    """Pads a tensor with zeros to a number of rows."""
    if not len(tensor.shape) or tensor.shape[0] == rows:
        return tensor
    others = [(0, 0)] * (len(tensor.shape) - 1)
    return ops.pad(tensor, [(0, rows - tensor.shape[0]), *others])
