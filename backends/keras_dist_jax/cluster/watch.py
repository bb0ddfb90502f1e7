"""Detection of lost workers, which ends waits for them.

A wait in native code that never ends is ended with the process, with the same
message and the exit status that asks for a restart.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from keras_dist.errors import RESTART_EXIT_CODE
from keras_dist.errors import KerasDistError
from keras_dist.errors import WorkerLostError
from keras_dist.plugins import INTERVAL
from keras_dist.plugins import SILENCE
from keras_dist.plugins import Blackboard
from keras_dist.plugins import Cluster
from keras_dist.plugins import SignsOfLife
from keras_dist.plugins import lost_error

DEFAULT_PATIENCE = 600.0
# In seconds: the silence after which a worker is blamed for a failed
# collective; the time that Python gets to raise an error.
_SILENCE, _GRACE = 3.0, 5.0
_LIVES, _LEFT, _FAILED, _LOST = "lives", "left", "failed", "lost"
_BUSY, _COMPILES, _FREE = "busy", "compiles", "free"
# Modules whose functions wait for programs.
_WAITING = ("keras_dist_jax.", "jax._src.array", "jax._src.interpreters.pxla")


class CoordinatorBoard(Blackboard):
    """The table of JAX's coordinator as a blackboard."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def write(self, key: str, text: str) -> None:
        with _connected():
            self._client.key_value_set(key, text, True)

    def read(self, keys: Sequence[str]) -> list[str]:
        folder = keys[0].rpartition("/")[0]
        with _connected():
            texts = dict(self._client.key_value_dir_get(f"{folder}/"))
        return [texts.get(key, "") for key in keys]


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # the base of JAX' own
        raise ConnectionError(
            f"the coordinator can't be reached ({error})"
        ) from error


class Watch(SignsOfLife):
    """A detector of lost workers, which announces that this one lives."""

    def __init__(
        self, client: Any, cluster: Cluster, timeout: float | None
    ) -> None:
        board = CoordinatorBoard(client)
        super().__init__(cluster, board, INTERVAL, 4 * INTERVAL)
        self._texts = dict.fromkeys(self._others, _LIVES)
        self._timeout = timeout or SILENCE
        self._patience = timeout or DEFAULT_PATIENCE
        # For each worker, what it does, and the time since when: it waits for
        # no other, or in a wait that its text names.
        self._states: dict[int, tuple[str, float]] = {}
        self._waits_since: float | None = None
        self._thread = 0
        self._pending: tuple[Any, float] | None = None
        self._lock = threading.Lock()
        self._end: tuple[float, int] | None = None
        self._is_known = False
        self.coordinator_lost = False  # JAX gave up on it
        self.has_raised = False  # Python knows of a lost worker
        self.start()

    def enter(self) -> None:
        """Notes that this worker may wait for others from now on."""
        self._waits_since = time.monotonic()
        self._thread = threading.get_ident()

    def exit(self, pending: object = None) -> None:
        """Notes that this worker now waits for an array at most."""
        self._waits_since = None
        if pending is not None:
            self._pending = pending, time.monotonic()

    def check(self, in_background: bool = False) -> None:
        """Raises an error that names the lost workers, if any are known.

        In the background, also those count that have ended, and the watch goes
        on: the thread that trains does not know yet."""
        if self.apart is not None:
            raise self.apart
        if in_background or self._is_known or self.coordinator_lost:
            lost = self._lost(self._timeout, ended=in_background)
            if lost:
                self.has_raised = self.has_raised or not in_background
                raise self._error(lost)

    def culprits(self) -> KerasDistError | None:
        """Returns the error of a failed collective, once silence shows."""
        began = time.monotonic()
        # Silence does not count while this process itself was stopped.
        while (
            time.monotonic() < max(began, self._granted) + 2 * _SILENCE + _GRACE
        ):
            if self.apart is not None:
                return self.apart
            lost = self._lost(_SILENCE, ended=True)
            if lost and not all(reason.follows for reason in lost.values()):
                self.has_raised = True
                return self._error(lost)
            time.sleep(INTERVAL / 5)
        lost = self._lost(_SILENCE, ended=True)
        self.has_raised = self.has_raised or bool(lost)
        return self._error(lost) if lost else None

    @property
    def is_cut_off(self) -> bool:
        """`True` if the coordinator has not answered for 3 seconds."""
        return time.monotonic() - self._looked > _SILENCE

    def leave(self, reason: str = "", failed: bool = False) -> None:
        """Tells the others that this worker ends, and stops watching."""
        self._over.set()
        kind = _FAILED if failed else _LOST if self.has_raised else _LEFT
        self._put(f"{kind} {reason}")
        self._end_threads(intervals=2)

    def fail(self, error: BaseException, status: int) -> None:
        """Tells the others why this worker ends, within 10 seconds."""
        lost = isinstance(error, WorkerLostError)
        text = "" if lost else f"{type(error).__name__}: {error}"
        self._end = time.monotonic() + 2 * _GRACE, status
        self._put(f"{_LOST if lost else _FAILED} {text}")

    def _put(self, text: str) -> None:
        """Writes a last text, and waits for that at most 2 seconds."""
        if self.coordinator_lost:
            return

        def write() -> None:
            # Without the coordinator, no worker could read the message.
            with self._lock, contextlib.suppress(Exception):
                self._put_text(text[:500])

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        thread.join(timeout=2)

    def _text(self) -> str:
        since = self._stuck_since()
        state = _FREE if since is None else f"{_BUSY}{since}"
        state = state if since is None or self._is_native() else _COMPILES
        return f"{_LIVES} {time.monotonic()} {state}"

    def _write(self) -> None:
        with self._lock:
            if self._end is None and not self._over.is_set():
                super()._write()

    def _exchange(self) -> None:
        self._look()  # the others see this worker at once
        super()._exchange()

    def _look(self) -> None:
        # Errors are ignored: the time since the last exchange shows a lasting
        # one.
        with contextlib.suppress(Exception):
            super()._look()
        for index, text in self._texts.items():
            kind, _, rest = text.partition(" ")
            state = rest.partition(" ")[2] if kind == _LIVES else ""
            if self._states.get(index, ("", 0.0))[0] != state:
                self._states[index] = state, self._looked

    def _watch(self) -> None:
        error_since: float | None = None
        while not self._over.wait(INTERVAL):
            now = self._now()
            if self._end is not None:
                end, status = self._end
                if now > end:
                    _end(status)
                continue
            lost = self._lost(self._timeout, ended=False)
            self._is_known = bool(lost)
            error, status, grace = self._known_error(lost)
            waits_since = self._stuck_since()
            if error is None or waits_since is None or self.has_raised:
                error_since = None
                continue
            error_since = now if error_since is None else error_since
            if now - max(error_since, waits_since) > grace:
                self.fail(error, status)
                print(
                    f"{type(error).__module__}.{type(error).__name__}: {error}",
                    file=sys.stderr,
                )
                _end(status)

    def _known_error(
        self, lost: "_Lost"
    ) -> tuple[KerasDistError | None, int, float]:
        """Returns why waits never end, the exit status for it, and the time
        that Python gets to raise it."""
        if self.apart is not None:
            return self.apart, 1, INTERVAL
        error = self._error(lost) if lost else None
        return error, RESTART_EXIT_CODE, _GRACE

    def end_if_apart(self) -> None:
        """Ends the process with an error if workers are at different calls.

        It is for a process that aborts: a collective got another one's data.
        """
        deadline = time.monotonic() + _GRACE
        while self.apart is None and time.monotonic() < deadline:
            time.sleep(INTERVAL / 5)
        error, status, _ = self._known_error({})
        if error is not None:
            self.fail(error, status)
            name = f"{type(error).__module__}.{type(error).__name__}"
            print(f"{name}: {error}", file=sys.stderr)
            _end(status)

    def _is_native(self) -> bool:
        """Tells whether the thread that waits does so outside of Python.

        Elsewhere it traces or compiles a program."""
        frame = sys._current_frames().get(self._thread)
        if self._waits_since is None or frame is None:
            return True  # an array is pending
        name: str = frame.f_globals.get("__name__", "")
        return name.startswith(_WAITING)

    def _stuck_since(self) -> float | None:
        if self._waits_since is not None:
            return self._waits_since
        if self._pending is None:
            return None
        array, since = self._pending
        try:
            ready = array.is_ready()
        except RuntimeError:  # a later step has deleted it
            ready = True
        return None if ready else since

    def _lost(self, silence: float, ended: bool) -> "_Lost":
        """Returns why workers are lost; key `None` is the coordinator."""
        now = self._now()
        unheard = now - max(self._looked, self._granted)
        if self.coordinator_lost:
            return {None: _Reason("ended")}
        if unheard > max(self._timeout, _SILENCE):
            return {None: _Reason(f"did not answer for {unheard:.0f} seconds")}
        lost: _Lost = {}
        for index, text in self._texts.items():
            kind, _, rest = text.partition(" ")
            # Measured at the last read of the table.
            silent = self._looked - max(self._seen[index], self._granted)
            if kind == _FAILED:
                lost[index] = _Reason(f"failed with {rest}")
            elif kind == _LOST:
                lost[index] = _Reason(
                    "ended because it lost another worker", True
                )
            elif kind == _LEFT and ended:
                lost[index] = _Reason("has ended already")
            elif kind == _LIVES and silent > silence and not self._runs(index):
                lost[index] = _Reason(
                    f"died, or has not answered for {silent:.0f} seconds"
                )
        lost = lost or self._idle(now)
        # Workers that ended because another was lost count only if there are no
        # other lost workers.
        first = {i: reason for i, reason in lost.items() if not reason.follows}
        return first or lost

    def _idle(self, now: float) -> "_Lost":
        """Returns live workers that keep this one waiting for too long."""
        waits_since = self._stuck_since()
        if waits_since is None:
            return {}
        states = self._states.copy()
        late = {
            index: now - max(since, waits_since, self._granted)
            for index, (_, since) in states.items()
        }
        idle = [i for i, (state, _) in states.items() if state == _FREE]
        if idle:
            what, indices = (
                "has not taken part",
                [i for i in idle if late[i] > self._patience],
            )
        elif self._is_native() and all(
            state.startswith(_BUSY) and late[index] > self._patience
            for index, (state, _) in states.items()
        ):
            # In the same call as this worker: else they would be apart.
            what, indices = "waits, as this worker does,", list(states)
        else:
            return {}
        return {
            i: _Reason(f"{what} for {late[i]:.0f} seconds") for i in indices
        }

    def _error(self, lost: "_Lost") -> WorkerLostError:
        cluster = self._cluster
        where = f"the coordinator at {cluster.coordinator or cluster.leader}"
        names = [
            f"{where if index is None else self._name(index)} {reason.text}"
            for index, reason in lost.items()
        ]
        return lost_error(cluster, "; ".join(names))


class _Reason(NamedTuple):
    """The reason why a worker counts as lost."""

    text: str
    follows: bool = False  # it ended because another one was lost


_Lost = dict[int | None, _Reason]


def _end(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
