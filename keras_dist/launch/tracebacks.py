"""Tracebacks of workers, kept back until it is clear who shows them."""

import re
import time

from keras_dist.launch.failures import TRACEBACK
from keras_dist.launch.output import Sink

# Seconds that a traceback is kept back from the screen if the process goes on.
PATIENCE = 2.0

_START = re.compile(rb"^" + re.escape(TRACEBACK.encode()), re.MULTILINE)


class TracebackSink:
    """Passes on stderr, but keeps back what follows the start of a traceback.

    If the process ends, the report of its failure may show the traceback in
    place of the screen's other lines.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._kept = bytearray()
        self._since = 0.0

    def write(self, data: bytes) -> None:
        start = None if self._kept else _START.search(data)
        if start is not None:
            self._since = time.monotonic()
            data, self._kept = (
                data[: start.start()],
                bytearray(data[start.start() :]),
            )
        elif self._kept:
            self._kept += data
            return
        if data:
            self._sink.write(data)

    def show_late(self, now: float) -> None:
        """Passes on what was kept back for long: the process goes on."""
        if self._kept and now > self._since + PATIENCE:
            self.show()

    def show(self) -> None:
        """Passes on what was kept back."""
        kept, self._kept = bytes(self._kept), bytearray()
        if kept:
            self._sink.write(kept)

    def drop(self, end: str) -> None:
        """Forgets what was kept back, from the last traceback on.

        Args:
            end: String, text with which it has to end.
        """
        kept = self._kept.rstrip()
        if kept.endswith(end.encode()):
            del self._kept[len(kept) - len(end.encode()) :]

    def close(self) -> None:
        """Ends the output, unless a traceback is kept back: see `finish`."""
        if not self._kept:
            self._sink.close()

    def finish(self) -> None:
        """Shows what was kept back, and ends the output."""
        self.show()
        self._sink.close()
