"""Meetings of all workers by name, before a collective of theirs.

Collectives have no names: workers that are at different ones would exchange
wrong values, or wait for ever. Texts are exchanged by name in place of a
collective, so that a thread can do it while others train.
"""

import contextlib
import time
from collections.abc import Callable
from collections.abc import Sequence

from keras_dist.core.plan import Cluster
from keras_dist.errors import ClusterError
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.errors import WorkerLostError
from keras_dist.plugin.chief_only import check_all_come
from keras_dist.plugin.heartbeats import SignsOfLife
from keras_dist.plugin.heartbeats import lost_error

_FOLDER = "keras_dist/meetings/"
_TEXTS = "keras_dist/texts/"
# Before the text of a worker, and in place of it.
_DONE, _FAILED = "+", "-"
# Seconds. A worker that is late, and in one wait for others for so long, will
# not come: what it waits for needs this worker. A program compiles in less.
_LATE = 60.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1


class Meetings:
    """Meetings on the blackboard of workers' signs of life.

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
        self._count = 0
        # Written beside the next one: a worker may be at the next meeting, or
        # have left this one with an error, before another looks.
        self._last = ""
        self._others = [
            i for i in range(cluster.num_workers) if i != cluster.index
        ]

    def meet(self, what: str) -> None:
        """Waits until all workers are here, for the same.

        Raises:
            ReplicaDivergenceError: If another worker is at something else, or
                if only the chief runs this code.
            WorkerLostError: If another worker is lost.
        """
        check_all_come(f"Reading or saving {what}")
        self._count += 1
        board = self._signs.board
        own = f"{self._count} {what}"
        board.write(f"{_FOLDER}{self._cluster.index}", f"{own}\n{self._last}")
        self._last = own
        self._signs.enter()
        try:
            self._wait(own)
        finally:
            self._signs.exit()

    def _wait(self, own: str) -> None:
        pause = _FIRST_PAUSE
        waits: dict[int, tuple[str, float]] = {}
        keys = [f"{_FOLDER}{index}" for index in self._others]
        while True:
            texts = self._signs.board.read(keys)
            late = []
            for index, text in zip(self._others, texts, strict=True):
                newest, _, before = text.partition("\n")
                count = int(newest.partition(" ")[0] or 0)
                theirs = newest if count == self._count else before
                if count < self._count:
                    late.append(index)
                elif theirs != own:
                    raise _apart(own, f"worker {index} is at {_name(theirs)}")
            if not late:
                return
            self._check(False)
            now = time.monotonic()
            for index in late:
                wait = self._signs.wait_of(index)
                known, since = waits.get(index, ("", now))
                if not wait or wait != known:
                    waits[index] = wait, now
                elif now - since > _LATE:
                    raise _apart(
                        own, f"worker {index} waits for something else"
                    )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

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
        own = keys[self._cluster.index]
        try:
            text = fn()
        except BaseException:
            # Without the board, the others find out that this one is lost.
            with contextlib.suppress(Exception):
                board.write(own, _FAILED)
            raise
        try:
            board.write(own, _DONE + text)
            texts = self._texts(keys)
        except ConnectionError as error:
            raise lost_error(self._cluster, str(error)) from error
        if _FAILED in texts:
            raise could_not(texts.index(_FAILED), what)
        return [each.removeprefix(_DONE) for each in texts]

    def _texts(self, keys: Sequence[str]) -> list[str]:
        """Waits for all texts."""
        pause = _FIRST_PAUSE
        while True:
            lost: WorkerLostError | None = None
            try:
                self._check(True)
            except WorkerLostError as error:
                lost = error
            # After the check: a worker may write, and then end.
            texts = self._signs.board.read(keys)
            if all(texts):
                return texts
            if lost is not None:
                raise lost
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def could_not(index: int, what: str) -> ClusterError:
    return ClusterError(
        f"Worker {index} could not {what}, and says why in its own error."
    )


def _name(text: str) -> str:
    return f"'{text.partition(' ')[2]}'"


def _apart(own: str, other: str) -> ReplicaDivergenceError:
    return ReplicaDivergenceError(
        "Each worker has a part of a sharded variable, so all workers have to "
        f"read, assign and save together. Received: this worker is at "
        f"{_name(own)}, and {other}. Expected: the same in the same order on "
        "every worker. Take it out of code that only some workers run, such as "
        "`if task_id == 0` or a callback that only the chief has."
    )
