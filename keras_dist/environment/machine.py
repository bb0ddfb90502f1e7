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
    """Counts the GPUs that nvidia-smi lists; adds its output if it failed."""
    if not shutil.which("nvidia-smi"):
        return 0, None
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            check=False,
            encoding="utf-8",
            errors="replace",
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise GpusError(
            "It is unknown which GPUs the workers share.\nReceived: "
            f"`nvidia-smi --list-gpus` did not end within {_SECONDS} seconds. "
            f"Expected: a list of GPUs. Set {VISIBLE}, to an empty text for "
            "no GPU, or check the driver."
        ) from error
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    failed = (listed.stdout + listed.stderr).strip()
    return count, failed if listed.returncode else None


def gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that processes started here see, as CUDA names them."""
    visible = visible_gpus(environ)
    if visible is not None:
        return visible
    count, _ = listed_gpus()
    return [str(index) for index in range(count)]


def share(names: list[str], position: int, num_local: int) -> list[str]:
    """Returns a worker's own consecutive GPUs, none if there are too few."""
    per_worker = len(names) // num_local
    return names[position * per_worker : (position + 1) * per_worker]


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def with_threads(
    inherited: Mapping[str, str], num_local: int
) -> tuple[dict[str, str], str | None]:
    """Shares the cores among local workers, unless the user has set a number.

    Returns the environment and what to tell the user, if anything.
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
