"""What the workers write: on the launcher's screen, and kept for a report."""

import os
from collections.abc import Callable
from typing import Literal
from typing import Protocol
from typing import TextIO

StreamName = Literal["stdout", "stderr"]

# A line is passed on in pieces of this size at most, in bytes.
LONGEST_LINE = 1 << 20

# How much of a worker's stderr is kept, in bytes.
KEPT = 1 << 16


class Sink(Protocol):
    """Takes what a worker writes, in the order of writing."""

    def write(self, data: bytes) -> object:
        """Takes some more."""

    def close(self) -> None:
        """Takes note that nothing follows."""


class Screen:
    """The launcher's own stdout and stderr, which all workers share.

    Args:
        stdout: Text stream.
        stderr: Text stream.
    """

    def __init__(self, stdout: TextIO, stderr: TextIO) -> None:
        self._streams = {"stdout": stdout, "stderr": stderr}
        self._held: list[tuple[StreamName, bytes, object]] | None = None
        # Who wrote the beginning of the line that the terminal's cursor is in.
        self._unfinished: object = None
        self._end_waiting: Callable[[], object] | None = None

    def wait(self, text: str) -> None:
        """Shows on a terminal that something is to come, until it comes.

        Args:
            text: String, what is waited for.
        """
        if self.is_terminal("stderr"):
            # Only now, so that what shows nothing starts at once.
            from rich.console import Console

            status = Console(file=self._streams["stderr"]).status(text)
            status.start()
            self._end_waiting = status.stop

    def end_waiting(self) -> None:
        """Something came, or nothing will."""
        end, self._end_waiting = self._end_waiting, None
        if end is not None:
            end()

    def is_terminal(self, stream: StreamName) -> bool:
        """Whether someone looks at it."""
        return self._streams[stream].isatty()

    def write(self, stream: StreamName, data: bytes, writer: object) -> None:
        """Writes, now or when nothing is held back any more.

        Args:
            stream: `"stdout"` or `"stderr"`.
            data: Bytes.
            writer: Anything that tells who writes. Another one's output does
                not go on in the middle of a line.
        """
        if self._held is not None:
            self._held.append((stream, data, writer))
            return
        if self.is_terminal(stream):
            if self._unfinished not in (None, writer):
                data = b"\n" + data
            self._unfinished = None if data.endswith(b"\n") else writer
        self._put(stream, data)

    def say(self, text: str) -> None:
        """Writes what the launcher itself has to say, at once.

        Lines that are indented belong to the one before.
        """
        lines = "".join(
            f"{line}\n" if line.startswith(" ") else f"keras-dist: {line}\n"
            for line in text.splitlines()
        )
        held, self._held = self._held, None
        self.write("stderr", lines.encode(), self)
        self._held = held

    def hold(self) -> None:
        """Holds back what workers write, until `release`."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        """Writes what was held back."""
        held, self._held = self._held or [], None
        for stream, data, writer in held:
            self.write(stream, data, writer)

    def _put(self, name: StreamName, data: bytes) -> None:
        self.end_waiting()
        stream = self._streams[name]
        try:
            # What a notebook has in its place takes text only.
            binary = getattr(stream, "buffer", None)
            if binary is None:
                stream.write(data.decode(errors="replace"))
            else:
                stream.flush()
                binary.write(data)
            stream.flush()
        except OSError:
            # A closed terminal, a pager that was left: training goes on.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


class Lines:
    """Shows whole lines, with the worker's name before each.

    Args:
        screen: The `Screen`.
        stream: `"stdout"` or `"stderr"`.
        name: String, what to write before each line.
    """

    def __init__(self, screen: Screen, stream: StreamName, name: str) -> None:
        self._screen = screen
        self._stream: StreamName = stream
        self._prefix = f"[{name}] ".encode()
        if screen.is_terminal(stream) and not os.environ.get("NO_COLOR"):
            self._prefix = b"\x1b[2m" + self._prefix + b"\x1b[0m"
        self._rest = bytearray()

    def write(self, data: bytes) -> None:
        """Shows the lines that are complete."""
        self._rest += data
        if b"\n" not in data and len(self._rest) <= LONGEST_LINE:
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._show(lines)
        self._rest = bytearray(rest)

    def close(self) -> None:
        """Shows a last line that has no end."""
        if self._rest:
            self._show([bytes(self._rest)])
            self._rest.clear()

    def _show(self, lines: list[bytes]) -> None:
        text = b"".join(self._prefix + line + b"\n" for line in lines)
        self._screen.write(self._stream, text, self)


class Bytes:
    """Shows everything at once as it is, such as a progress bar.

    Args:
        screen: The `Screen`.
        stream: `"stdout"` or `"stderr"`.
    """

    def __init__(self, screen: Screen, stream: StreamName) -> None:
        self._screen = screen
        self._stream: StreamName = stream

    def write(self, data: bytes) -> None:
        """Shows it."""
        # The worker's two streams may share a line.
        self._screen.write(self._stream, data, "chief")

    def close(self) -> None:
        """Nothing is kept back."""


class Tail:
    """The end of what was written.

    Example:

    >>> tail = Tail()
    >>> tail.write(b"a" * 100_000 + b"b")
    >>> len(tail.text), tail.text[-2:]
    (65536, 'ab')
    """

    def __init__(self) -> None:
        self._kept = bytearray()

    @property
    def text(self) -> str:
        """It, as text."""
        return self._kept.decode(errors="replace")

    def write(self, data: bytes) -> None:
        """Keeps the last of it."""
        self._kept += data
        del self._kept[:-KEPT]

    def close(self) -> None:
        """It stays."""


def on_screen(
    screen: Screen, stream: StreamName, name: str, is_chief: bool
) -> Sink:
    """How a worker's stream is shown.

    On a terminal the chief's is passed on byte by byte, so that its progress
    bars move.
    """
    if is_chief and screen.is_terminal(stream):
        return Bytes(screen, stream)
    return Lines(screen, stream, name)
