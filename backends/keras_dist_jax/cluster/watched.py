"""The throttle of one of several workers."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from keras_dist.plugins import Call
from keras_dist.plugins import FlightRecorder
from keras_dist_jax.cluster.watch import Watch
from keras_dist_jax.throttle import Throttle


class WatchedThrottle(Throttle):
    """A throttle that tells a watch when this worker may wait for others."""

    waits = True

    def __init__(
        self,
        throttle: Throttle,
        watch: Watch,
        recorder: FlightRecorder,
        explain: Callable[[BaseException], BaseException],
    ) -> None:
        self._throttle = throttle
        self._watch = watch
        self._recorder = recorder
        self._explain = explain
        self._pending: Any = None
        self._depth = 0

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:  # type: ignore[override]
        return self._locked()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._throttle.lock:
            outside = self._depth
            try:
                self._depth = outside + 1
                self._watch.enter()
                yield
            finally:
                self._depth = outside
                if not outside:
                    self._watch.exit(self._pending)
                    self._pending = None

    def drain(self, owner: object) -> None:
        self._watch.check()
        try:
            self._throttle.drain(owner)
        except Exception as error:
            cause = self.explain(error)
            if cause is error:
                raise
            raise cause from error

    def record(self, call: str) -> None:
        self._recorder.note(Call(call, call))

    def enter(self, owner: object, witness: object) -> None:
        self._pending = witness
        self._throttle.enter(owner, witness)

    def leave(self, owner: object) -> None:
        self._watch.enter()
        try:
            self._throttle.leave(owner)
        finally:
            self._watch.exit()

    def explain(self, error: Exception) -> BaseException:
        return self._explain(error)
