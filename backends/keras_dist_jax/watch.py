"""The watch: which workers live, and what to do when one does not.

Each worker says that it lives, from a thread, in the coordinator's table. So
a worker that computes, compiles or saves for long is not missed; one that was
killed, stopped or cut off is. The first choice is that an error is raised
where the worker waits. A wait in native code that nothing ends is ended with
the process, with the same message and the exit status that asks for a restart.
"""

import contextlib
import os
import sys
import threading
import time
from typing import Any
from typing import NamedTuple

from keras_dist.core.cluster import Cluster
from keras_dist.errors import RESTART_EXIT_CODE
from keras_dist.errors import WorkerLostError

DEFAULT_TIMEOUT, DEFAULT_PATIENCE = 60.0, 600.0
# Seconds between two signs of life; after a collective has failed, those after
# which a silent worker is the one; and those that Python gets to raise.
BEAT, SILENCE, GRACE = 0.5, 3.0, 5.0
_TABLE = "keras_dist/workers/"
_LIVES, _LEFT, _FAILED, _LOST = "lives", "left", "failed", "lost"
_BUSY, _FREE = "busy", "free"


class Watch:
    """Tells the other workers that this one lives, and looks after them.

    Args:
        client: A client of the coordinator, with a table.
        cluster: The `Cluster`.
        timeout: Float or `None`. Seconds of silence after which one is lost,
            and for which one that lives may keep this one waiting. By default
            60 for silence, and 600 for one that lives.

    Attributes:
        coordinator_lost: Whether JAX gave up on the coordinator.
        has_raised: Whether Python knows that a worker was lost.
    """

    def __init__(
        self, client: Any, cluster: Cluster, timeout: float | None
    ) -> None:
        self._client = client
        self._cluster = cluster
        self._timeout = timeout or DEFAULT_TIMEOUT
        self._patience = timeout or DEFAULT_PATIENCE
        self._own = f"{_TABLE}{cluster.index}"
        now = time.monotonic()
        # Of each worker, what it said last and when that was new.
        self._said = dict.fromkeys(range(cluster.num_workers), (_LIVES, now))
        self._heard = self._granted = self._looked = now
        # Of those that wait for nobody, since when.
        self._free: dict[int, float] = {}
        self._waits_since: float | None = None
        self._pending: tuple[Any, float] | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._end: tuple[float, int] | None = None
        self._is_known = False
        self.coordinator_lost = False
        self.has_raised = False
        self._threads = [
            threading.Thread(target=target, name=f"keras_dist-{name}")
            for name, target in (("beat", self._beat), ("watch", self._judge))
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def enter(self) -> None:
        """From now on this worker may have to wait for others."""
        self._waits_since = time.monotonic()

    def exit(self, pending: Any = None) -> None:
        """It has gone on, while the others may still be needed.

        Args:
            pending: `jax.Array` that is ready once they are not, or `None`.
        """
        self._waits_since = None
        if pending is not None:
            self._pending = pending, time.monotonic()

    def check(self) -> None:
        """Raises if a worker is known to be lost.

        Raises:
            WorkerLostError: It names those that were lost.
        """
        if self._is_known or self.coordinator_lost:
            lost = self._lost(self._timeout, ended=False)
            if lost:
                raise self._error(lost)

    def culprits(self) -> WorkerLostError | None:
        """Finds out who made a collective fail, which may take seconds."""
        began = time.monotonic()
        # While this worker was held up itself, nobody's silence counted.
        while (
            time.monotonic() < max(began, self._granted) + 2 * SILENCE + GRACE
        ):
            lost = self._lost(SILENCE, ended=True)
            if lost and not all(each.follows for each in lost.values()):
                return self._error(lost)
            time.sleep(BEAT / 5)
        lost = self._lost(SILENCE, ended=True)
        return self._error(lost) if lost else None

    @property
    def is_cut_off(self) -> bool:
        """Whether the coordinator has not answered for a while."""
        return time.monotonic() - self._heard > SILENCE

    def leave(self, reason: str = "", failed: bool = False) -> None:
        """Says that this worker ends, and stops watching."""
        self._over.set()
        kind = _FAILED if failed else _LOST if self.has_raised else _LEFT
        self._put(f"{kind} {reason}"[:500])
        for thread in self._threads:
            thread.join(timeout=2 * BEAT)

    def fail(self, error: BaseException, status: int) -> None:
        """Says what ends this worker, which it does soon."""
        lost = isinstance(error, WorkerLostError)
        text = "" if lost else f"{type(error).__name__}: {error}"
        self._end = time.monotonic() + 2 * GRACE, status
        self._put(f"{_LOST if lost else _FAILED} {text}"[:500])

    def _put(self, text: str) -> None:
        """Writes to the table, or gives up soon: nothing may wait for it."""
        if self.coordinator_lost:
            return
        thread = threading.Thread(target=self._put_now, args=(text,))
        thread.daemon = True
        thread.start()
        thread.join(timeout=2)

    def _put_now(self, text: str) -> None:
        # A coordinator that can't be told can't tell anybody either.
        with self._lock, contextlib.suppress(Exception):
            self._client.key_value_set(self._own, text, True)

    def _beat(self) -> None:
        count = 0
        while not self._over.is_set():
            count += 1
            try:
                with self._lock:
                    if self._end is None and not self._over.is_set():
                        state = _BUSY if self._stuck_since() else _FREE
                        self._client.key_value_set(
                            self._own, f"{_LIVES} {count} {state}", True
                        )
                table = self._client.key_value_dir_get(_TABLE)
            except Exception:
                self._over.wait(BEAT)
                continue
            self._heard = now = time.monotonic()
            for key, text in table:
                index = int(key.rpartition("/")[2])
                if self._said[index][0] != text:
                    self._said[index] = text, now
                if text.startswith(_LIVES) and text.endswith(_FREE):
                    self._free.setdefault(index, now)
                else:
                    self._free.pop(index, None)
            self._over.wait(BEAT)

    def _judge(self) -> None:
        found: float | None = None
        while not self._over.wait(BEAT):
            now = self._look()
            if self._end is not None:
                end, status = self._end
                if now > end:
                    _end(status)
                continue
            lost = self._lost(self._timeout, ended=False)
            self._is_known = bool(lost)
            waits_since = self._stuck_since()
            if not lost or waits_since is None or self.has_raised:
                found = None
                continue
            found = now if found is None else found
            if now - max(found, waits_since) > GRACE:
                error = self._error(lost)
                self.fail(error, RESTART_EXIT_CODE)
                print(
                    f"{type(error).__module__}.{type(error).__name__}: {error}",
                    file=sys.stderr,
                )
                _end(RESTART_EXIT_CODE)

    def _look(self) -> float:
        """The time, and whether this process was stopped itself until now."""
        now = time.monotonic()
        if now - self._looked > 4 * BEAT:
            self._granted = now
        self._looked = now
        return now

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
        """Who is lost; `None` stands for the coordinator."""
        now = self._look()
        unheard = now - max(self._heard, self._granted)
        if self.coordinator_lost:
            return {None: _Reason("ended")}
        if unheard > max(self._timeout, SILENCE):
            return {None: _Reason(f"did not answer for {unheard:.0f} seconds")}
        found: _Lost = {}
        for index, (text, since) in self._said.items():
            if index == self._cluster.index:
                continue
            kind, _, rest = text.partition(" ")
            # Seen from when the table was last read.
            silent = self._heard - max(since, self._granted)
            if kind == _FAILED:
                found[index] = _Reason(f"failed with {rest}")
            elif kind == _LOST:
                found[index] = _Reason("ended: it lost another one", True)
            elif kind == _LEFT and ended:
                found[index] = _Reason("has ended already")
            elif kind == _LIVES and silent > silence:
                found[index] = _Reason(
                    f"died, or does not answer (for {silent:.0f} seconds)"
                )
        found = found or self._idle(now)
        first = {i: each for i, each in found.items() if not each.follows}
        return first or found

    def _idle(self, now: float) -> "_Lost":
        """Who lives, but keeps this worker waiting for too long."""
        since = self._stuck_since()
        if since is None:
            return {}
        return {
            index: _Reason(f"takes no part (for {now - free:.0f} seconds)")
            for index, free in self._free.copy().items()
            if index != self._cluster.index
            and now - max(free, since, self._granted) > self._patience
        }

    def _error(self, lost: "_Lost") -> WorkerLostError:
        self.has_raised = True
        cluster = self._cluster
        names = []
        for index, reason in lost.items():
            if index is None:
                where = cluster.coordinator or cluster.leader
                names.append(f"the coordinator at {where} {reason.text}")
            else:
                address = cluster.addresses[index]
                names.append(f"worker {index} at {address} {reason.text}")
        return WorkerLostError(
            f"Worker {cluster.index} can't go on without the others: "
            f"{'; '.join(names)}. See what that worker printed, and start all "
            "workers again, for instance with `keras-dist run "
            "--max-restarts`."
        )


class _Reason(NamedTuple):
    """Why a worker is lost, and whether only because another one was."""

    text: str
    follows: bool = False


_Lost = dict[int | None, _Reason]


def _end(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
