"""Sharing the GPUs of this machine among its workers."""

import shutil
import subprocess
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that processes started here see, as CUDA names them.

    Args:
        environ: What the launcher was started with. CUDA_VISIBLE_DEVICES says
            it, or else nvidia-smi.

    Returns:
        List of strings; an empty one where nothing can be told.
    """
    if VISIBLE in environ:
        names = [name.strip() for name in environ[VISIBLE].split(",")]
        # What follows an invalid one is not visible either.
        end = next((i for i, n in enumerate(names) if n in ("", "-1")), None)
        return names[:end]
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(
        ["nvidia-smi", "--list-gpus"],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    lines = [x for x in listed.stdout.splitlines() if x.startswith("GPU ")]
    return [str(index) for index in range(len(lines))]


def share(names: list[str], position: int, num_local: int) -> list[str]:
    """A worker's own GPUs: as many for each, in order.

    Args:
        names: List of strings, all GPUs.
        position: Integer, the worker's among those of this machine.
        num_local: Integer, how many there are.

    Returns:
        List of strings, empty where there is not one for each worker.

    Example:

    >>> share(["0", "1", "2", "3"], position=1, num_local=2)
    ['2', '3']
    """
    each = len(names) // num_local
    return names[position * each : (position + 1) * each]
