"""A process that loads one backend and answers requests."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import IO
from typing import Any
from typing import Self

from keras_dist.launch.failures import Failure

MODULE = "keras_dist.cli.jobs.self_test"

# Each framework has its own variables to silence the log of its start, and to
# allocate the memory of GPUs on demand.
_UNLESS_SET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}

_NUM_LINES = 12


class ChildError(Exception):
    """Raised when a process has ended, or did not answer in time."""

    def __init__(self, reason: str, lines: str, has_ended: bool) -> None:
        super().__init__(reason)
        self.lines = lines
        self.has_ended = has_ended

    @property
    def summary(self) -> str:
        """The reason and the last line of output: in a traceback, the error."""
        lines = self.lines.strip().splitlines()
        frames = [n for n, line in enumerate(lines) if line.startswith("  ")]
        # An error's message may have several lines, which are not indented.
        last = " ".join(lines[frames[-1] + 1 if frames else -1 :]).strip()
        return f"{self}: {last}" if last else str(self)


class Child:
    """A process of one backend; `close` kills it and all that it started."""

    def __init__(
        self, backend: str, variables: Mapping[str, str] | None = None
    ) -> None:
        self._name = f"the process of {backend}"
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._channel, replies = os.pipe()
        self._received = b""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(replies)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(replies,),
                # A process group of its own, which `_kill` ends with all that
                # it started.
                start_new_session=True,
                env={
                    **_UNLESS_SET,
                    **os.environ,
                    **(variables or {}),
                    "KERAS_BACKEND": backend,
                },
            )
        except BaseException:
            os.close(self._channel)
            self._log.close()
            raise
        finally:
            os.close(replies)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(
        self, job: str, arguments: Mapping[str, Any], limit: float
    ) -> dict[str, Any]:
        """Sends a job and returns its answer; raises `ChildError`."""
        assert self._process.stdin is not None
        request = json.dumps({"job": job, "arguments": dict(arguments)})
        # If the process has ended already, `answer` raises.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        return self.answer(limit)

    def answer(self, limit: float) -> dict[str, Any]:
        """Returns the next answer; the first describes backend and devices."""
        deadline = time.monotonic() + limit
        while b"\n" not in self._received:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._channel], [], [], left)[0]:
                self._kill()
                reason = f"no answer within {limit:.0f} s"
                raise ChildError(reason, self._lines(), False)
            more = os.read(self._channel, 65536)
            if not more:
                self._process.wait()
                status = self._process.returncode
                how = Failure(self._name, status).how()
                raise ChildError(f"its process {how}", self._lines(), True)
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._kill()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._channel)
        self._log.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _lines(self) -> str:
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        return "\n".join(text.rstrip().splitlines()[-_NUM_LINES:])
