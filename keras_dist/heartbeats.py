"""Heartbeats: noticing that another worker has fallen silent."""

import threading
import time
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence

from keras_dist.cluster import Cluster

# Seconds without a sign of life after which a worker counts as lost.
SILENCE = 60.0
# Seconds between two signs of life.
INTERVAL = 0.5


class Blackboard(ABC):
    """What every worker can write on and read, by the framework's engine."""

    @abstractmethod
    def write(self, key: str, text: str) -> None:
        """Replaces the text under a key.

        Raises:
            ConnectionError: If the blackboard is gone.
        """

    @abstractmethod
    def read(self, keys: Sequence[str]) -> list[str]:
        """The texts under keys; an empty one where nothing was written.

        Raises:
            ConnectionError: If the blackboard is gone.
        """


class Heartbeats:
    """A thread that gives signs of life, and watches those of the others.

    Args:
        cluster: The `Cluster`.
        board: `Blackboard` that all workers share.
        keeper: Integer, the worker that is lost if the board is gone; `None`
            if it is kept outside of the workers.
        silence: Float, seconds after which a silent worker is lost.
        on_loss: Callable without arguments, called once, in the thread.
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
        self._texts = dict.fromkeys(self._others, "")
        self._seen = dict.fromkeys(self._others, time.monotonic())
        self._is_gone = False
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="keras_dist-heartbeats", daemon=True
        )

    def start(self) -> None:
        """Begins; the others may not have begun yet."""
        self._thread.start()

    def stop(self, reason: str) -> None:
        """Ends, and tells the others why.

        Args:
            reason: String, such as "ended" or the error that ended it.
        """
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        try:
            self._board.write(_reason_key(self._cluster.index), reason)
        except ConnectionError:  # nobody is left to be told
            self._is_gone = True

    def describe_lost(self) -> str:
        """Which workers are lost, and why, as far as that can be told.

        Called when something failed: it waits for a few signs of life.

        Returns:
            String such as "worker 1 at 10.0.0.2:9000 gives no sign of life".
        """
        before = dict(self._seen)
        time.sleep(4 * self._interval)  # for those who live to show it
        reasons = self._reasons()
        found = []
        for index in self._others:
            if reasons.get(index):
                found.append(f"{self._name(index)} {reasons[index]}")
            elif self._seen[index] == before[index]:
                found.append(f"{self._name(index)} gives no sign of life")
        if self._is_gone and self._keeper is not None:
            return f"{self._name(self._keeper)} can't be reached"
        return "; ".join(found)

    def have_ended(self) -> bool:
        """Whether every other worker has ended, or can't be asked."""
        reasons = self._reasons()
        return self._is_gone or all(reasons.get(i) for i in self._others)

    def _name(self, index: int) -> str:
        address = self._cluster.addresses[index]
        return f"worker {index}" + (f" at {address}" if address else "")

    def _reasons(self) -> dict[int, str]:
        keys = [_reason_key(index) for index in self._others]
        try:
            return dict(zip(self._others, self._board.read(keys), strict=True))
        except ConnectionError:
            self._is_gone = True
            return {}

    def _run(self) -> None:
        count = 0
        woke = time.monotonic()
        while not self._over.wait(self._interval):
            now = time.monotonic()
            if now - woke > self._silence / 2:
                # This process was stopped itself: nobody can be blamed.
                self._seen = dict.fromkeys(self._others, now)
            woke = now
            count += 1
            try:
                self._beat(count, now)
            except ConnectionError:
                self._is_gone = True
            if self._is_gone or any(
                now - seen > self._silence for seen in self._seen.values()
            ):
                self._on_loss()
                return

    def _beat(self, count: int, now: float) -> None:
        own = _beat_key(self._cluster.index)
        self._board.write(own, str(count))
        keys = [_beat_key(index) for index in self._others]
        texts = self._board.read(keys)
        for index, text in zip(self._others, texts, strict=True):
            if text != self._texts[index]:
                self._texts[index] = text
                self._seen[index] = now


def _beat_key(index: int) -> str:
    return f"keras_dist/beat/{index}"


def _reason_key(index: int) -> str:
    return f"keras_dist/ended/{index}"
