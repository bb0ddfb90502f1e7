"""Messages of all workers by name, without a collective.

Texts are exchanged by name in place of a collective, so that a thread in the
background can do it while others train.
"""

import contextlib
import json
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence

from keras_dist.core.plan import Cluster
from keras_dist.errors import ClusterError
from keras_dist.errors import KerasDistError
from keras_dist.plugin.heartbeats import SignsOfLife
from keras_dist.plugin.heartbeats import lost_error
from keras_dist.plugin.recorder import apart

_TEXTS = "keras_dist/texts/"
_SAID = "keras_dist/said/"
# Before the text of a worker, and in place of it.
_DONE, _FAILED = "+", "-"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1
# How many things that were said are kept.
_KEPT = 64
# Said by a chief that is at something that takes its time.
BEGUN = "."
# Seconds for which a chief that waits for this worker may still come.
_AHEAD = 2.0


class Messages:
    """Messages on the blackboard of workers' signs of life.

    `check` raises the error of a lost worker, if there is one; its argument
    tells whether this is for a thread in the background.
    """

    def __init__(
        self,
        cluster: Cluster,
        signs: SignsOfLife,
        check: Callable[[bool], None],
    ) -> None:
        self._cluster = cluster
        self._signs = signs
        self._check = check
        # By name, what this worker has said; the last ones are kept.
        self._said: dict[str, str] = {}

    def exchange(
        self, name: str, what: str, fn: Callable[[], str]
    ) -> list[str]:
        """Calls a function on each worker, and returns all results on all.

        It takes no collective, so any thread may call it. A name is used once.

        Raises:
            ClusterError: If another worker had an error in its function.
            WorkerLostError: If another worker is lost.
        """
        board = self._signs.board
        keys = [
            f"{_TEXTS}{name}/{index}"
            for index in range(self._cluster.num_workers)
        ]
        local_key = keys[self._cluster.index]
        try:
            text = fn()
        except BaseException:
            # Without the board, the others find out that this one is lost.
            with contextlib.suppress(Exception):
                board.write(local_key, _FAILED)
            raise
        with self._connected():
            board.write(local_key, _DONE + text)
        readings = self._readings(keys)
        texts, lost = next(readings)
        while not all(texts):
            if lost is not None:
                raise lost
            texts, lost = next(readings)
        if _FAILED in texts:
            raise could_not(texts.index(_FAILED), what)
        return [reply.removeprefix(_DONE) for reply in texts]

    def say(self, name: str, text: str) -> None:
        """Tells the other workers, who may hear it later.

        Args:
            name: String, what it is about; a later text replaces it.
            text: String; of all names but the last, its first character stays.
        """
        kept = {n: t[:1] for n, t in self._said.items() if n != name}
        self._said = dict([*kept.items()][-_KEPT:]) | {name: text}
        with self._connected():
            self._signs.board.write(
                f"{_SAID}{self._cluster.index}", json.dumps(self._said)
            )

    def hear(self, name: str, what: str, patience: float) -> str:
        """Waits for what the chief says, and returns it.

        Args:
            name: String, what it is about.
            what: String, what this worker is at, for errors.
            patience: Float, seconds to wait for a chief that has not said
                `BEGUN`.

        Raises:
            ReplicaDivergenceError: If the chief waits for this worker.
            WorkerLostError: If the chief is lost, or says nothing in time.
        """
        start = time.monotonic()
        ahead = start  # when the chief began to wait for this worker
        readings = self._readings([f"{_SAID}0"])
        while True:
            (said,), lost = next(readings)
            text: str = json.loads(said or "{}").get(name, "")
            if text not in ("", BEGUN):
                return text
            if lost is not None:
                raise lost
            now = time.monotonic()
            call = self._signs.call_ahead(0)
            if not call or text:
                ahead = now
            elif now - ahead > _AHEAD:
                raise apart([(call, ""), *self._other_calls(what)])
            if not text and now - start > patience:
                raise lost_error(
                    self._cluster,
                    f"worker 0 has not come to {what} for {patience:g} seconds",
                )

    def _other_calls(self, what: str) -> list[tuple[str, str]]:
        others = range(1, self._cluster.num_workers)
        local_index = self._cluster.index
        return [(what if index == local_index else "", "") for index in others]

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except ConnectionError as error:
            raise lost_error(self._cluster, str(error)) from error

    def _readings(
        self, keys: Sequence[str]
    ) -> Iterator[tuple[list[str], KerasDistError | None]]:
        """Yields what is written, again and again, and the error of workers
        that were lost, or apart, before: they may write, and then end."""
        pause, lost = _FIRST_PAUSE, None
        while True:
            try:
                self._check(True)
            except KerasDistError as error:
                lost = error
            with self._connected():
                texts = self._signs.board.read(keys)
            yield texts, lost
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def could_not(index: int, what: str) -> ClusterError:
    return ClusterError(
        f"Worker {index} could not {what}, and says why in its own error."
    )
