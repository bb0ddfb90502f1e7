"""Workers: the collectives between the workers of a cluster."""

import atexit
import contextlib
import contextvars
import functools
import os
import sys
import warnings
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from keras import ops

from keras_dist.core.options import CommunicationOptions
from keras_dist.core.plan import Cluster
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.reduction import combine
from keras_dist.core.rows import Share
from keras_dist.errors import RESTART_EXIT_CODE
from keras_dist.errors import ClusterError
from keras_dist.errors import WorkerLostError
from keras_dist.plugin.chief_only import check_all_come
from keras_dist.plugin.meetings import Meetings
from keras_dist.plugin.meetings import could_not

_COLLECTIVES = ("sum", "gather", "broadcast", "concatenate")
_EXCHANGE = "An exchange of values, such as `strategy.reduce`,"


class Workers(ABC):
    """The collectives between workers, called by all in the same order, from
    one thread at a time. Results are on the primary device."""

    # `None` on backends that keep each variable whole.
    meetings: Meetings | None = None
    # False where tensors are only described, as in a simulation.
    have_values = True

    def __init_subclass__(cls) -> None:
        for name in _COLLECTIVES:
            if name in vars(cls):
                setattr(cls, name, _of_all(vars(cls)[name]))

    def __init__(self, cluster: Cluster, options: CommunicationOptions) -> None:
        self.cluster = cluster
        self.options = options

    def check_same(
        self, cluster: Cluster, options: CommunicationOptions
    ) -> None:
        """Raises `ClusterError` for another cluster or other options."""
        if options not in (self.options, CommunicationOptions()):
            raise ClusterError(
                "A process connects to the other workers only once, with the "
                f"options of its first strategy. Received: {options}. "
                f"Expected: {self.options}. Pass the same "
                "`communication_options` to all strategies."
            )
        if cluster != self.cluster:
            raise ClusterError(
                "A process belongs to one cluster until it ends. Received: "
                f"{cluster}. Expected: {self.cluster}. Make all strategies "
                "with the same cluster resolver."
            )

    @abstractmethod
    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """Sums each tensor over the workers, in few collectives."""

    @abstractmethod
    def gather(self, tensors: Sequence[Any]) -> list[list[Any]]:
        """Returns every worker's tensors, of the same shapes, in order."""

    def gather_rows(
        self, tensors: Sequence[Any], shares: Sequence[Share]
    ) -> list[list[Any]]:
        """Gathers tensors of any size along axis 0: in one collective if these
        are the numbers of rows, else in two."""
        # Each tensor is padded or cut to the largest number of rows, and sent
        # with its true size. Tensors of other sizes are sent again.
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
        """Returns the chief's tensors; shapes are the same on each worker."""

    @abstractmethod
    def concatenate(self, tensor: Any, axis: int) -> Any:
        """Concatenates the workers' tensors, which may differ along `axis`."""

    def meet(self, what: str) -> None:
        """Waits for all workers, which have to come for the same.

        Backends that can't tell do nothing."""
        if self.meetings is not None:
            self.meetings.meet(what)

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
        assert self.meetings is not None

        def checked() -> str:
            text, failure = "", None
            try:
                text = fn()
            except Exception as error:
                failure = error
            self.check_all(failure, what)
            return text

        return self.meetings.exchange(
            name, what, fn if in_background else checked
        )

    def explain(self, error: BaseException) -> BaseException:
        """Returns the `WorkerLostError` that caused an error, else the
        error."""
        return error

    def leave(self, reason: str, failed: bool) -> None:
        """Leaves the cluster; a process that `failed` does not wait for
        others."""

    def combine(self, op: ReduceOp, value: Any, num_replicas: int) -> Any:
        """Combines the workers' partial results; for `MEAN`, these are sums."""
        if op is ReduceOp.SUM:
            return self.sum([value])[0]
        if op is ReduceOp.MEAN:
            total = self.sum([value])[0]
            return ops.true_divide(total, num_replicas)
        return combine(op, [each[0] for each in self.gather([value])])

    def chief_value(self, value: np.ndarray) -> np.ndarray:
        """Sends the chief's NumPy array to every worker."""
        tensor = ops.convert_to_tensor(value)
        return np.asarray(ops.convert_to_numpy(self.broadcast([tensor])[0]))

    def concatenate_numbers(self, numbers: Sequence[Any]) -> list[Any]:
        """Returns the integers, below 2**31, of all workers in order."""
        own = ops.stack([ops.cast(number, "int32") for number in numbers])
        joined = ops.concatenate([each[0] for each in self.gather([own])])
        if any(ops.is_tensor(number) for number in numbers):
            return [joined[i] for i in range(joined.shape[0])]
        return [int(number) for number in ops.convert_to_numpy(joined)]


def _of_all(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Has a collective raise where only the chief would come to it."""

    @functools.wraps(collective)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check_all_come(_EXCHANGE)
        return collective(*args, **kwargs)

    return checked


def total_of(op: ReduceOp) -> ReduceOp:
    """Returns the operation within a worker for `op`: `SUM` for `MEAN`."""
    return ReduceOp.SUM if op is ReduceOp.MEAN else op


def _with_rows(tensor: Any, rows: int) -> Any:
    """Cuts a tensor to a number of rows, or pads it with zeros."""
    if not len(tensor.shape) or tensor.shape[0] == rows:
        return tensor
    missing = max(rows - tensor.shape[0], 0)
    others = [(0, 0)] * (len(tensor.shape) - 1)
    return ops.pad(tensor[:rows], [(0, missing), *others])


# The clusters that this process has joined.
_left_at_exit: list[Workers] = []
# Reasons why the process ends; the last one counts.
_reasons = ["ended"]


@functools.cache
def watch_exceptions() -> None:
    """Installs an exception hook that tells other workers why this one ends,
    and exits with a status that asks for a restart if one was lost."""
    hook = sys.excepthook

    def excepthook(
        kind: type[BaseException],
        error: BaseException,
        traceback: TracebackType | None,
    ) -> None:
        explained = error
        for workers in _left_at_exit if isinstance(error, Exception) else ():
            explained = workers.explain(error)
        if explained is not error:
            explained.__cause__ = error
            kind, traceback = type(explained), explained.__traceback__
        _reasons.append(f"ended with {kind.__name__}: {explained}")
        hook(kind, explained, traceback)
        if not isinstance(explained, WorkerLostError):
            return
        if not _left_at_exit:
            raise SystemExit(RESTART_EXIT_CODE)
        for workers in _left_at_exit:
            workers.leave(_reasons[-1], failed=True)
        # Threads that wait for the lost worker may never end by themselves.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(RESTART_EXIT_CODE)

    sys.excepthook = excepthook


@functools.cache
def leave_at_exit(workers: Workers) -> None:
    """Makes this process tell its cluster when and why it ends."""

    def leave() -> None:
        workers.leave(_reasons[-1], failed=len(_reasons) > 1)

    watch_exceptions()
    _left_at_exit.append(workers)
    atexit.register(leave)


# A file that `keras-dist run` looks for when the worker ends.
JOINED_FILE = "KERAS_DIST_JOINED_FILE"
# Set to 1 by `keras-dist run --independent`.
INDEPENDENT = "KERAS_DIST_INDEPENDENT"

_joined: set[int] = set()


def note_joined() -> None:
    """Notes that this process has joined a cluster, and tells its launcher."""
    _joined.add(os.getpid())
    path = os.environ.get(JOINED_FILE)
    if not path:
        return
    try:
        Path(path).touch()
    except OSError as error:
        warnings.warn(
            "This worker can't tell its launcher that it joined the others: "
            f"{error}. `keras-dist run` will treat this worker as one that "
            "trained alone. Allow workers to write to that folder, or pass "
            "--independent.",
            stacklevel=2,
        )


def has_joined() -> bool:
    """Returns true if this process belongs to a cluster."""
    return os.getpid() in _joined


def is_independent(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns true if the user wants workers to train independently."""
    return environ.get(INDEPENDENT, "0") not in ("", "0")


_on_purpose = contextvars.ContextVar("keras_dist_trains_alone", default=False)


@contextlib.contextmanager
def alone_on_purpose() -> Iterator[None]:
    """Allows each worker to train models of its own inside the context."""
    token = _on_purpose.set(True)
    try:
        yield
    finally:
        _on_purpose.reset(token)


def is_alone_on_purpose() -> bool:
    """Returns whether `alone_on_purpose` is open."""
    return _on_purpose.get()
