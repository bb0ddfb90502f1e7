"""The output of a process, passed on as it comes."""

import os
import selectors
from collections.abc import Sequence
from typing import IO

from keras_dist.launch.launcher.output import Sink

# Bytes that are read at once.
CHUNK = 1 << 16

# The system lets a pipe hold 1 MiB at most.
CHUNKS_IN_A_PIPE = 16


class Pipe:
    """The reading end of a process' output, and the sinks that take it.

    It registers with `selector`, with the method to call when there is
    something to read.
    """

    def __init__(
        self,
        stream: IO[bytes],
        selector: selectors.BaseSelector,
        sinks: Sequence[Sink],
    ) -> None:
        os.set_blocking(stream.fileno(), False)
        selector.register(stream, selectors.EVENT_READ, self.pump)
        self._stream = stream
        self._selector = selector
        self._sinks = sinks

    def pump(self) -> bool:
        """Passes on a chunk; returns false if there was nothing to read."""
        if self._stream.closed:
            return False
        try:
            data = os.read(self._stream.fileno(), CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(self._stream)
            self._stream.close()
            return False
        for sink in self._sinks:
            sink.write(data)
        return True

    def drain(self) -> None:
        """Passes on what the pipe holds; its writers may still be alive."""
        for _ in range(CHUNKS_IN_A_PIPE):
            if not self.pump():
                break

    def close(self) -> None:
        """Passes on the rest, and closes the pipe and its sinks."""
        self.drain()
        if not self._stream.closed:
            self._selector.unregister(self._stream)
            self._stream.close()
        for sink in self._sinks:
            sink.close()
