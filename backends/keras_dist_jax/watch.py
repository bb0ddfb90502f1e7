"""Detection of lost workers, which ends waits for them.

Each worker writes to the coordinator's table, from a thread, that it lives. So
a worker that computes, compiles or saves for long is not missed; one that was
killed, stopped or cut off is. The first choice is that an error is raised
where the worker waits. A wait in native code that never ends is ended with
the process, with the same message and the exit status that asks for a restart.
"""

import contextlib
import os
import sys
import threading
import time
from typing import Any
from typing import NamedTuple

from keras_dist.core.plan import Cluster
from keras_dist.errors import RESTART_EXIT_CODE
from keras_dist.errors import WorkerLostError

DEFAULT_TIMEOUT, DEFAULT_PATIENCE = 60.0, 600.0
# Seconds between two signs of life; of silence after which a worker is blamed
# for a collective that failed; and that Python gets to raise an error.
BEAT, SILENCE, GRACE = 0.5, 3.0, 5.0
_TABLE = "keras_dist/workers/"
_LIVES, _LEFT, _FAILED, _LOST = "lives", "left", "failed", "lost"
_BUSY, _FREE = "busy", "free"


class Watch:
    """A detector of lost workers, which announces that this one lives.

    `timeout` is the seconds of silence after which a worker is lost (60 by
    default), and for which a live one may keep this one waiting (600 by
    default).

    Attributes:
        coordinator_lost: Whether JAX gave up on the coordinator.
        has_raised: Whether a lost worker was reported to Python.
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
        # By worker: its last message, and when that was first seen.
        self._said = dict.fromkeys(range(cluster.num_workers), (_LIVES, now))
        self._heard = self._granted = self._looked = now
        # By worker that waits for no other: since when.
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
        """Notes that this worker may wait for others from now on."""
        self._waits_since = time.monotonic()

    def exit(self, pending: Any = None) -> None:
        """Notes that this worker no longer waits.

        `pending` is a `jax.Array` that is ready once the others are not needed
        any more, or `None`.
        """
        self._waits_since = None
        if pending is not None:
            self._pending = pending, time.monotonic()

    def check(self) -> None:
        """Raises an error if workers are known to be lost.

        Raises:
            WorkerLostError: An error that names them.
        """
        if self._is_known or self.coordinator_lost:
            lost = self._lost(self._timeout, ended=False)
            if lost:
                raise self._error(lost)

    def culprits(self) -> WorkerLostError | None:
        """Returns the error that names the workers behind a failed collective.

        It waits for seconds until their silence shows; `None` if none is found.
        """
        began = time.monotonic()
        # Silence while this process was stopped itself does not count.
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
        """`True` if the coordinator has not answered for 3 seconds."""
        return time.monotonic() - self._heard > SILENCE

    def leave(self, reason: str = "", failed: bool = False) -> None:
        """Tells the others that this worker ends, and stops watching."""
        self._over.set()
        kind = _FAILED if failed else _LOST if self.has_raised else _LEFT
        self._put(f"{kind} {reason}"[:500])
        for thread in self._threads:
            thread.join(timeout=2 * BEAT)

    def fail(self, error: BaseException, status: int) -> None:
        """Tells the others why this worker ends, within 10 seconds."""
        lost = isinstance(error, WorkerLostError)
        text = "" if lost else f"{type(error).__name__}: {error}"
        self._end = time.monotonic() + 2 * GRACE, status
        self._put(f"{_LOST if lost else _FAILED} {text}"[:500])

    def _put(self, text: str) -> None:
        """Writes to the table, and waits for that at most 2 seconds."""
        if self.coordinator_lost:
            return
        thread = threading.Thread(target=self._put_now, args=(text,))
        thread.daemon = True
        thread.start()
        thread.join(timeout=2)

    def _put_now(self, text: str) -> None:
        # Without the coordinator, no worker could read the message.
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
        """Returns the time, after checking whether this process was stopped."""
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
        """Returns the lost workers and why; key `None` is the coordinator.

        Workers that ended for another's loss are left out if there are others.
        `ended` also counts those that have ended without an error.
        """
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
            # Measured at the last read of the table.
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
        """Returns live workers that keep this one waiting for too long."""
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
    """The reason why a worker counts as lost.

    `follows` says that the worker ended because another one was lost.
    """

    text: str
    follows: bool = False


_Lost = dict[int | None, _Reason]


def _end(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
