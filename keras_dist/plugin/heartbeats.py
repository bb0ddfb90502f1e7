"""Heartbeats: detection of workers that have stopped answering."""

import threading
import time
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence

from keras_dist.core.plan import Cluster

# Seconds without a sign of life after which a worker counts as lost.
SILENCE = 60.0
# Seconds between two signs of life.
INTERVAL = 0.5
# Exchanges without a sign of life after which a worker is named as lost.
_ROUNDS = 4


class Blackboard(ABC):
    """A key-value store that all workers share, by the framework's engine."""

    @abstractmethod
    def write(self, key: str, text: str) -> None:
        """Replaces the text under a key.

        Raises:
            ConnectionError: If the store can't be reached any more.
        """

    @abstractmethod
    def read(self, keys: Sequence[str]) -> list[str]:
        """Returns the texts under keys, empty where nothing was written.

        Raises:
            ConnectionError: If the store can't be reached any more.
        """


class Heartbeats:
    """Signs of life that workers exchange through a `Blackboard`.

    One thread writes and reads the board, and may block if the worker that
    serves the board hangs. Another thread watches the time.

    Args:
        cluster: The `Cluster` of the workers.
        board: `Blackboard` that all workers share.
        keeper: Integer, the worker that serves the board, and is lost if the
            board can't be reached; `None` if no worker serves it.
        silence: Float, seconds after which a silent worker is lost.
        on_loss: Callable without arguments, called once, in a thread.
    """

    def __init__(
        self,
        cluster: Cluster,
        board: Blackboard,
        keeper: int | None,
        silence: float = SILENCE,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        self._cluster = cluster
        self._board = board
        self._keeper = keeper
        self._silence = silence
        self._interval = min(INTERVAL, silence / 5)
        self._on_loss = on_loss
        self._others = [
            i for i in range(cluster.num_workers) if i != cluster.index
        ]
        self._own_reason = ""
        self._has_told = threading.Event()
        # For each other worker: its last text, its reason to end, the time
        # and the number of the exchange at which its text changed last.
        self._texts = dict.fromkeys(self._others, "")
        self._reasons = dict.fromkeys(self._others, "")
        self._seen = dict.fromkeys(self._others, time.monotonic())
        self._heard = dict.fromkeys(self._others, 0)
        self._rounds = 0
        self._looked = time.monotonic()
        self._is_gone = False
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Starts the threads; other workers may start theirs later."""
        self._looked = time.monotonic()
        self._seen = dict.fromkeys(self._others, self._looked)
        for target in (self._exchange, self._watch):
            name = f"keras_dist-heartbeats-{target.__name__.strip('_')}"
            thread = threading.Thread(target=target, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, reason: str, patience: float) -> None:
        """Tells the other workers why this one ends; waits for them to end.

        Args:
            reason: String, such as "ended", or the error that ended it.
            patience: Float, longest time to wait, in seconds.
        """
        self._own_reason = reason
        deadline = time.monotonic() + patience
        self._has_told.wait(4 * self._interval)
        while (
            time.monotonic() < deadline
            and not self._is_gone
            and not all(self._reasons.values())
        ):
            time.sleep(self._interval / 10)
        self._over.set()
        # A thread that returns from native code after the interpreter is gone
        # aborts the process. But a thread may hang, so joins have a timeout.
        for thread in self._threads:
            thread.join(4 * self._interval)

    def describe_lost(self) -> str:
        """Describes the lost workers, after a wait for a few signs of life.

        Returns:
            String such as "worker 1 at 10.0.0.2:9000 gives no sign of life";
            empty if no worker is known to be lost.
        """
        self._wait_for_rounds(2 * _ROUNDS)
        found = []
        for index in self._others:
            if self._reasons[index]:
                found.append(f"{self._name(index)} {self._reasons[index]}")
            elif self._rounds - self._heard[index] >= _ROUNDS:
                found.append(f"{self._name(index)} gives no sign of life")
        if self._is_gone and self._keeper is not None:
            return f"{self._name(self._keeper)} can't be reached"
        return "; ".join(found)

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

    def _name(self, index: int) -> str:
        address = self._cluster.addresses[index]
        return f"worker {index}" + (f" at {address}" if address else "")

    def _exchange(self) -> None:
        while not self._over.wait(self._interval):
            try:
                self._look()
            except ConnectionError:
                self._is_gone = True
                return

    def _look(self) -> None:
        index = self._cluster.index
        self._board.write(_key("beat", index), str(self._rounds))
        if self._own_reason and not self._has_told.is_set():
            self._board.write(_key("ended", index), self._own_reason)
            self._has_told.set()
        beats = [_key("beat", other) for other in self._others]
        ends = [_key("ended", other) for other in self._others]
        texts = self._board.read([*beats, *ends])
        now = time.monotonic()
        for position, other in enumerate(self._others):
            self._reasons[other] = texts[len(beats) + position]
            if texts[position] != self._texts[other]:
                self._texts[other] = texts[position]
                self._seen[other] = now
                self._heard[other] = self._rounds + 1
        self._rounds += 1
        self._looked = now

    def _watch(self) -> None:
        woke = time.monotonic()
        while not self._over.wait(self._interval):
            now = time.monotonic()
            if now - woke > self._silence / 2:
                # This process itself was suspended: no other one is to blame.
                self._looked = now
                self._seen = dict.fromkeys(self._others, now)
            woke = now
            if now - self._looked > self._silence:
                self._is_gone = True
            if self._is_gone or any(
                now - seen > self._silence for seen in self._seen.values()
            ):
                self._on_loss()
                return


def _key(kind: str, index: int) -> str:
    return f"keras_dist/{kind}/{index}"
