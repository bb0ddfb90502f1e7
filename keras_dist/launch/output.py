"""The workers' output: on the launcher's screen, and kept for a report."""

import os
import selectors
from collections.abc import Callable
from collections.abc import Sequence
from typing import IO
from typing import Literal
from typing import Protocol
from typing import TextIO

StreamName = Literal["stdout", "stderr"]

# The longest piece of a line that is passed on, in bytes.
LONGEST_LINE = 1 << 20

# Bytes of a worker's stderr that are kept.
KEPT = 1 << 16


# Bytes that are read at once.
CHUNK = 1 << 16

# The system lets a pipe hold 1 MiB at most.
CHUNKS_IN_A_PIPE = 16


class Sink(Protocol):
    """A consumer of a worker's output, in the order of writing."""

    def write(self, data: bytes) -> object:
        """Consumes more output."""

    def close(self) -> None:
        """Ends the output."""


class Screen:
    """The launcher's own stdout and stderr, which all workers share."""

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._buffered: list[tuple[StreamName, bytes, object]] | None = None
        # The writer of the unfinished line at the terminal's cursor.
        self._unfinished: object = None
        self._end_waiting: Callable[[], object] | None = None

    def wait(self, text: str) -> None:
        """Shows a status text on a terminal until output comes."""
        if self.is_terminal("stderr"):
            # Imported late, so that a launcher without a terminal starts at
            # once.
            from rich.console import Console

            status = Console(file=self._streams["stderr"]).status(text)
            status.start()
            self._end_waiting = status.stop

    def end_waiting(self) -> None:
        end, self._end_waiting = self._end_waiting, None
        if end is not None:
            end()

    def is_terminal(self, stream: StreamName) -> bool:
        return self._streams[stream].isatty()

    def write(self, stream: StreamName, data: bytes, writer: object) -> None:
        """Writes output of a worker, or keeps it while output is held back."""
        if self._buffered is not None:
            self._buffered.append((stream, data, writer))
            return
        if self.is_terminal(stream):
            # One writer does not continue another one's unfinished line.
            if self._unfinished not in (None, writer):
                data = b"\n" + data
            self._unfinished = None if data.endswith(b"\n") else writer
        self._put(stream, data)

    def say(self, text: str) -> None:
        """Writes a message of the launcher, even while output is held back."""
        # An indented line belongs to the one before.
        lines = "".join(
            f"{line}\n" if line.startswith(" ") else f"keras-dist: {line}\n"
            for line in text.splitlines()
        )
        buffered, self._buffered = self._buffered, None
        self.write("stderr", lines.encode(), self)
        self._buffered = buffered

    def hold(self) -> None:
        if self._buffered is None:
            self._buffered = []

    def release(self) -> None:
        buffered, self._buffered = self._buffered or [], None
        for stream, data, writer in buffered:
            self.write(stream, data, writer)

    def _put(self, name: StreamName, data: bytes) -> None:
        self.end_waiting()
        stream = self._streams[name]
        try:
            # A notebook's stream takes text only.
            binary = getattr(stream, "buffer", None)
            if binary is None:
                stream.write(data.decode(errors="replace"))
            else:
                stream.flush()
                binary.write(data)
            stream.flush()
        except OSError:
            # The terminal was closed, or a pager was left: training goes on.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


class Lines:
    """A sink that shows whole lines, with the worker's name before each."""

    def __init__(self, screen: Screen, stream: StreamName, name: str) -> None:
        self._screen = screen
        self._stream: StreamName = stream
        self._prefix = f"[{name}] ".encode()
        if screen.is_terminal(stream) and not os.environ.get("NO_COLOR"):
            self._prefix = b"\x1b[2m" + self._prefix + b"\x1b[0m"
        self._rest = bytearray()

    def write(self, data: bytes) -> None:
        self._rest += data
        if b"\n" not in data and len(self._rest) <= LONGEST_LINE:
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._show(lines)
        self._rest = bytearray(rest)

    def close(self) -> None:
        if self._rest:
            self._show([bytes(self._rest)])
            self._rest.clear()

    def _show(self, lines: list[bytes]) -> None:
        text = b"".join(self._prefix + line + b"\n" for line in lines)
        self._screen.write(self._stream, text, self)


class Bytes:
    """A sink that shows output at once as it is, such as a progress bar."""

    def __init__(self, screen: Screen, stream: StreamName) -> None:
        self._screen = screen
        self._stream: StreamName = stream

    def write(self, data: bytes) -> None:
        # One writer for both streams of the worker, which may share a line.
        self._screen.write(self._stream, data, "chief")

    def close(self) -> None:
        """Does nothing, because no output is kept back."""


class Tail:
    """A sink that keeps the last `KEPT` bytes."""

    def __init__(self) -> None:
        self._kept = bytearray()

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")

    def write(self, data: bytes) -> None:
        self._kept += data
        del self._kept[:-KEPT]

    def close(self) -> None:
        """Does nothing: the text stays."""


def on_screen(
    screen: Screen, stream: StreamName, name: str, is_chief: bool
) -> Sink:
    """Returns the sink that shows a worker's stream."""
    # Byte by byte on a terminal, so that progress bars move.
    if is_chief and screen.is_terminal(stream):
        return Bytes(screen, stream)
    return Lines(screen, stream, name)


class Pipe:
    """The reading end of a process' output, and the sinks that take it."""

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
