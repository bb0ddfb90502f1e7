"""Workers that wait in different calls, by TensorFlow's coordination service.

TensorFlow has heartbeats of its own. Its service is asked only while a worker
does not go on.
"""

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from keras_dist.errors import ReplicaDivergenceError
from keras_dist.plugins import INTERVAL
from keras_dist.plugins import Blackboard
from keras_dist.plugins import Cluster
from keras_dist.plugins import FlightRecorder
from keras_dist.plugins import SignsOfLife
from keras_dist_tensorflow import runtime_internals

# In how many milliseconds the service answers that there is no such text.
_ANSWER_MS = 5
# Around what one worker tells the others.
_BEGIN, _END = "<keras_dist: ", " :keras_dist>"


class ServiceBoard(Blackboard):
    """The table of TensorFlow's coordination service as a blackboard."""

    def write(self, key: str, text: str) -> None:
        try:
            runtime_internals.write_text(key, text)
        except tf.errors.OpError as error:
            raise ConnectionError(str(error)) from error

    def read(self, keys: Sequence[str]) -> list[str]:
        try:
            return [
                runtime_internals.read_text(key, _ANSWER_MS) for key in keys
            ]
        except tf.errors.OpError as error:
            raise ConnectionError(str(error)) from error


class Calls(SignsOfLife):
    """Ends collectives of workers that wait in different calls."""

    def __init__(self, cluster: Cluster, recorder: FlightRecorder) -> None:
        # With many workers, each asks less often.
        interval = INTERVAL * max(1, cluster.num_workers // 8)
        super().__init__(cluster, ServiceBoard(), interval, interval)
        self.recorder = recorder
        self._recorded = ""
        # The service answers a question for a text that is not there when there
        # is one, and then no others if these are many: so there is one.
        self._put_text("")

    def stop(self) -> None:
        """Ends the threads."""
        self._end_threads()

    def _look(self) -> None:
        assert self.recorder is not None
        before, self._recorded = self._recorded, self.recorder.line()
        if before == self._recorded:
            super()._look()

    def _text(self) -> str:
        return ""

    def _watch(self) -> None:
        while not self._over.wait(self._interval):
            if self.apart is not None:
                message = f"{_BEGIN}{self.apart.args[0]}{_END}"
                # The others may not have noticed yet.
                with contextlib.suppress(tf.errors.OpError):
                    runtime_internals.tell_all_workers(message)
                runtime_internals.abort_collectives(message)
                return

    def found_in(self, error: BaseException) -> ReplicaDivergenceError | None:
        """Returns the error of workers that are apart, if that is its cause."""
        if not isinstance(error, tf.errors.OpError):
            return None
        _, separator, rest = error.message.partition(_BEGIN)
        if self.apart is None and separator:
            return ReplicaDivergenceError(rest.partition(_END)[0])
        return self.apart
