"""Leaves out what compilers log on standard error, and nothing else."""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# Information, the line that says where it goes, and what the compiler for GPUs
# says of a program that does not fit: `plan` says it too.
_NOISE = re.compile(
    rb"I\d{4} |WARNING: All log messages before absl::|"
    rb"[EW]\d{4} .*gpu_hlo_schedule\.cc"
)


@contextlib.contextmanager
def without_log_noise() -> Iterator[None]:
    """Holds back standard error, and then writes all but log information."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held:
                if not _NOISE.match(line):
                    os.write(2, line)
