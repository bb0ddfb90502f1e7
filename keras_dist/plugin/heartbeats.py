"""Heartbeats: detection of workers that have stopped answering."""

import contextlib
import threading
import time
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence

from keras_dist.core.plan import Cluster
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.errors import WorkerLostError
from keras_dist.joining.addresses import listen
from keras_dist.joining.addresses import own_host
from keras_dist.joining.addresses import split
from keras_dist.joining.pulse import Pulse
from keras_dist.joining.pulse import has_pulse
from keras_dist.plugin.recorder import FlightRecorder
from keras_dist.plugin.recorder import apart

# Seconds without a sign of life after which a worker counts as lost.
SILENCE = 60.0
# Seconds between two signs of life.
INTERVAL = 0.5
FOLDER = "keras_dist/beat/"
# Exchanges without a sign of life after which a worker is named as lost.
_ROUNDS = 4
# Seconds for which workers have to be at different calls, until they count as
# apart: those that exchange values find out themselves, with an error on each.
_APART = 2.0


class Blackboard(ABC):
    """A key-value store that all workers share, by the framework's engine.

    Both methods raise `ConnectionError` if it can't be reached.
    """

    @abstractmethod
    def write(self, key: str, text: str) -> None:
        """Replaces the text under a key."""

    @abstractmethod
    def read(self, keys: Sequence[str]) -> list[str]:
        """Returns the texts under keys, empty where nothing was written."""


class SignsOfLife(ABC):
    """Texts that workers exchange through a `Blackboard`, by two threads.

    One writes and reads the board, and may block if the process that serves
    the board hangs. The other one watches the time. A text begins with a line
    about the worker's calls. A worker whose native code holds Python's lock
    writes nothing, but has a `Pulse`.
    """

    # What this worker does together with the others.
    recorder: FlightRecorder | None = None

    def __init__(
        self,
        cluster: Cluster,
        board: Blackboard,
        interval: float,
        suspension: float,
    ) -> None:
        self.board = board
        self._cluster = cluster
        self._interval = interval
        self._key = _key(cluster.index)
        self._others = [
            i for i in range(cluster.num_workers) if i != cluster.index
        ]
        now = time.monotonic()
        # The last text of each other worker, and when that was first seen.
        self._texts = dict.fromkeys(self._others, "")
        self._seen = dict.fromkeys(self._others, now)
        # What each other worker told last of its calls.
        self._calls = dict.fromkeys(self._others, "")
        # The times of the last exchange, of the last look at the clock, and of
        # the last one after which this process was suspended itself, so that
        # no other one is to blame for silence before.
        self._looked = self._woke = self._granted = now
        self._suspension = suspension
        self._is_gone = False
        self._pulse: Pulse | None = None
        # The address of each other worker's pulse, as soon as it is known.
        self._pulses: dict[int, tuple[str, int]] = {}
        # The error of workers that wait in different calls, and since when
        # they are.
        self.apart: ReplicaDivergenceError | None = None
        self._apart_since: float | None = None
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, has_pulse: bool = True) -> None:
        """Starts the threads; other workers may start theirs later."""
        if has_pulse:
            self._start_pulse()
        for target in (self._exchange, self._watch):
            name = f"keras_dist-heartbeats-{target.__name__.strip('_')}"
            thread = threading.Thread(target=target, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _start_pulse(self) -> None:
        address = self._cluster.addresses[self._cluster.index]
        host = own_host(address, self._cluster.leader)
        self._pulse = Pulse(listen(f"[{host}]:0"))
        # At once: native code may hold the lock from now on.
        with contextlib.suppress(ConnectionError):
            self.board.write(
                _pulse_key(self._cluster.index), self._pulse.address
            )

    def _end_threads(self, intervals: int = 4) -> None:
        self._over.set()
        # A thread that returns from native code after the interpreter is gone
        # aborts the process. But a thread may hang, so joins have a timeout.
        for thread in self._threads:
            thread.join(intervals * self._interval)
        if self._pulse is not None:
            self._pulse.close()

    def _exchange(self) -> None:
        while not self._over.wait(self._interval):
            try:
                self._look()
            except ConnectionError:
                self._is_gone = True
                return

    def _look(self) -> None:
        """Writes this worker's text, and reads those of the others."""
        self._write()
        if self._pulse and len(self._pulses) < len(self._others):
            self._find_pulses()
        readings = self.board.read([_key(other) for other in self._others])
        self._looked = now = time.monotonic()
        for other, lines in zip(self._others, readings, strict=True):
            self._calls[other], _, text = lines.partition("\n")
            if text not in ("", self._texts[other]):
                self._texts[other], self._seen[other] = text, now
        self._compare()

    def _find_pulses(self) -> None:
        texts = self.board.read([_pulse_key(other) for other in self._others])
        self._pulses = {
            other: split(text)
            for other, text in zip(self._others, texts, strict=True)
            if text
        }

    def _runs(self, index: int) -> bool:
        """Tells whether a silent worker runs, which is a sign of life."""
        runs = index in self._pulses and has_pulse(*self._pulses[index])
        # The wait for an answer is no suspension of this process.
        self._woke = time.monotonic()
        if not runs:
            return False
        self._seen[index] = time.monotonic()
        return True

    def _write(self) -> None:
        self._put_text(self._text())

    def _put_text(self, text: str) -> None:
        calls = "" if self.recorder is None else self.recorder.line()
        self.board.write(self._key, f"{calls}\n{text}")

    def _compare(self) -> None:
        """Notes that workers have been at different calls for a while."""
        if self.recorder is None or self.apart is not None:
            return
        calls = self._calls.items()
        compared = {i: self.recorder.apart_from(line) for i, line in calls}
        pairs = {index: pair for index, pair in compared.items() if pair}
        if not pairs:
            self._apart_since = None
            return
        now = time.monotonic()
        if self._apart_since is None:
            self._apart_since = now
        if now - self._apart_since < _APART:
            return
        texts = [""] * self._cluster.num_workers
        for index, (call, other_call) in pairs.items():
            texts[self._cluster.index], texts[index] = call, other_call
        self.apart = apart([(text, "") for text in texts])

    def call_ahead(self, index: int) -> str:
        """Returns the call of a worker that has made more than this one."""
        line = self._calls[index]
        return "" if self.recorder is None else self.recorder.ahead_in(line)

    @abstractmethod
    def _text(self) -> str:
        """Returns a new text at each call, which others take for a beat."""

    @abstractmethod
    def _watch(self) -> None:
        """Judges who is lost, until `_over` is set."""

    def _now(self) -> float:
        """Returns the time, after checking whether this process was stopped."""
        now = time.monotonic()
        if now - self._woke > self._suspension:
            self._granted = now
        self._woke = now
        return now

    def _name(self, index: int) -> str:
        address = self._cluster.addresses[index]
        return f"worker {index}" + (f" at {address}" if address else "")


class Heartbeats(SignsOfLife):
    """Signs of life that tell when a worker was silent for too long.

    If the board can't be reached, its `server` is lost: the worker that serves
    it, or `None`. A loss, or workers that are apart, call `on_loss` once, in a
    thread.
    """

    def __init__(
        self,
        cluster: Cluster,
        board: Blackboard,
        server: int | None,
        silence: float = SILENCE,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        interval = min(INTERVAL, silence / 5)
        super().__init__(cluster, board, interval, silence / 2)
        self._server = server
        self._silence = silence
        self._on_loss = on_loss
        self._own_reason = ""
        self._has_told = threading.Event()
        # The number of exchanges, and of that at which a text changed last.
        self._rounds = 0
        self._heard = dict.fromkeys(self._others, 0)

    def stop(self, reason: str, patience: float) -> None:
        """Tells the other workers why this one ends; waits for them to end."""
        self._own_reason = reason
        deadline = time.monotonic() + patience
        self._has_told.wait(4 * self._interval)
        while (
            time.monotonic() < deadline
            and not self._is_gone
            and not all(map(self._reason, self._others))
        ):
            time.sleep(self._interval / 10)
        self._end_threads()

    def describe_lost(self) -> str:
        """Describes the lost workers, after a wait for a few signs of life.

        It is empty if no worker is known to be lost.
        """
        self._wait_for_rounds(2 * _ROUNDS)
        lost = []
        for index in self._others:
            is_silent = self._rounds - self._heard[index] >= _ROUNDS
            if self._reason(index):
                lost.append(f"{self._name(index)} {self._reason(index)}")
            elif is_silent and not self._runs(index):
                lost.append(f"{self._name(index)} gives no sign of life")
        if self._is_gone and self._server is not None:
            return f"{self._name(self._server)} can't be reached"
        return "; ".join(lost)

    def _reason(self, index: int) -> str:
        """Returns why a worker has ended; empty as long as it lives."""
        return self._texts[index].partition(" ")[2]

    def _wait_for_rounds(self, count: int) -> None:
        """Waits for a number of exchanges, so that live workers are heard."""
        until = self._rounds + count
        deadline = time.monotonic() + 4 * count * self._interval
        while (
            self._rounds < until
            and not self._is_gone
            and time.monotonic() < deadline
        ):
            time.sleep(self._interval / 4)
        if self._rounds == until - count:  # the worker with the board hangs
            self._is_gone = True

    def _text(self) -> str:
        return f"{self._rounds} {self._own_reason}"

    def _look(self) -> None:
        super()._look()
        rounds = self._rounds + 1
        for other, seen in self._seen.items():
            if seen == self._looked:
                self._heard[other] = rounds
        # Whoever waits for rounds then knows who was heard in them.
        self._rounds = rounds

    def _write(self) -> None:
        tells = bool(self._own_reason)
        super()._write()
        if tells:
            self._has_told.set()

    def _watch(self) -> None:
        while not self._over.wait(self._interval):
            now = self._now()
            if now - max(self._looked, self._granted) > self._silence:
                self._is_gone = True
            is_lost = self._is_gone or any(
                now - max(seen, self._granted) > self._silence
                and not self._runs(index)
                for index, seen in self._seen.items()
            )
            if is_lost or self.apart is not None:
                self._on_loss()
                return


def lost_error(cluster: Cluster, who: str) -> WorkerLostError:
    """Makes the error of this worker that names the lost ones, and why."""
    return WorkerLostError(
        f"Worker {cluster.index} can't go on without the others: {who}. See "
        "what that worker printed, and start all workers again, for instance "
        "with `keras-dist run --max-restarts`."
    )


def _key(index: int) -> str:
    return f"{FOLDER}{index}"


def _pulse_key(index: int) -> str:
    return f"keras_dist/pulse/{index}"
