"""The GPUs and cores of this machine, and their shares for workers."""

import os
import shutil
import subprocess
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"
_SECONDS = 60


class GpusError(RuntimeError):
    """Raised when the GPUs of a machine can't be found out."""


def visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Returns the GPUs in CUDA_VISIBLE_DEVICES; `None` if it is not set."""
    if VISIBLE not in environ:
        return None
    names = [name.strip() for name in environ[VISIBLE].split(",")]
    # CUDA ignores an invalid name and all names after it.
    end = next((i for i, n in enumerate(names) if n in ("", "-1")), None)
    return names[:end]


def listed_gpus() -> tuple[int, str | None]:
    """Counts the GPUs that nvidia-smi lists, 0 without it.

    Also returns its output if it failed, else `None`.

    Raises:
        subprocess.TimeoutExpired: If it does not end.
    """
    if not shutil.which("nvidia-smi"):
        return 0, None
    listed = subprocess.run(
        ["nvidia-smi", "--list-gpus"],
        capture_output=True,
        check=False,
        encoding="utf-8",
        errors="replace",
        timeout=_SECONDS,
    )
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    failed = (listed.stdout + listed.stderr).strip()
    return count, failed if listed.returncode else None


def gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that processes started here see, as CUDA names them.

    They are read from CUDA_VISIBLE_DEVICES, or else from nvidia-smi. The list
    is empty if neither tells.

    Raises:
        GpusError: If nvidia-smi does not end.
    """
    visible = visible_gpus(environ)
    if visible is not None:
        return visible
    try:
        count, _ = listed_gpus()
    except subprocess.TimeoutExpired as error:
        raise GpusError(
            "The GPUs that workers share can't be found out. Received: no end "
            f"of `nvidia-smi --list-gpus` within {_SECONDS} seconds. Expected: "
            f"a list. Set {VISIBLE}, to an empty text for no GPU, or look "
            "after the driver."
        ) from error
    return [str(index) for index in range(count)]


def share(names: list[str], position: int, num_local: int) -> list[str]:
    """Returns a worker's own GPUs: consecutive, and equally many for each.

    `position` is the worker's among the `num_local` of this machine. The list
    is empty if there are fewer GPUs than workers.

    Example:

    >>> share(["0", "1", "2", "3"], position=1, num_local=2)
    ['2', '3']
    """
    each = len(names) // num_local
    return names[position * each : (position + 1) * each]


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def with_threads(
    inherited: Mapping[str, str], num_local: int
) -> tuple[dict[str, str], str | None]:
    """Shares the cores among the workers of this machine.

    Otherwise each worker would start a thread for every core. A number that the
    user has set is kept. Returns the environment, and a sentence to show, or
    `None` if nothing was changed.

    Example:

    >>> with_threads({"OMP_NUM_THREADS": "3"}, 2)
    ({'OMP_NUM_THREADS': '3'}, None)
    """
    environment = dict(inherited)
    if num_local == 1 or environment.get(THREADS):
        return environment, None
    cores = num_cores()
    threads = max(1, cores // num_local)
    environment[THREADS] = str(threads)
    return environment, (
        f"each worker gets {THREADS}={threads} ({cores} cores, "
        f"{num_local} workers here); set it to choose another number"
    )
