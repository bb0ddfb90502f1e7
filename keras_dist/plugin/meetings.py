"""Meetings of all workers by name, without a collective.

Texts are exchanged by name in place of a collective, so that a thread in the
background can do it while others train.
"""

import contextlib
import time
from collections.abc import Callable
from collections.abc import Sequence

from keras_dist.core.plan import Cluster
from keras_dist.errors import ClusterError
from keras_dist.errors import WorkerLostError
from keras_dist.plugin.heartbeats import SignsOfLife
from keras_dist.plugin.heartbeats import lost_error

_TEXTS = "keras_dist/texts/"
# Before the text of a worker, and in place of it.
_DONE, _FAILED = "+", "-"
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
