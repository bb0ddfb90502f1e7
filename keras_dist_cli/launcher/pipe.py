"""What a process writes, passed on as it comes."""

import os
import selectors
from collections.abc import Sequence
from typing import IO

from keras_dist_cli.launcher.output import Sink

# In bytes.
CHUNK = 1 << 16

# The system lets a pipe hold 1 MiB at most.
CHUNKS_IN_A_PIPE = 16


class Pipe:
    """The reading end of a process' output, and who takes what comes.

    Args:
        stream: The reading end.
        selector: Where it is registered, with the function to call when there
            is something to read.
        sinks: Sequence of `Sink`.
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
        """Passes on a chunk; false if there was nothing to read."""
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
        """Passes on what the pipe holds, though others may still write."""
        for _ in range(CHUNKS_IN_A_PIPE):
            if not self.pump():
                break

    def close(self) -> None:
        """Passes on the rest, and reads no more."""
        self.drain()
        if not self._stream.closed:
            self._selector.unregister(self._stream)
            self._stream.close()
        for sink in self._sinks:
            sink.close()
