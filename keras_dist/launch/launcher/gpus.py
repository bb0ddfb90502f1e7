"""Sharing of a machine's GPUs among its workers."""

import shutil
import subprocess
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"
_SECONDS = 60


class GpusError(RuntimeError):
    """Raised when the GPUs of a machine can't be found out."""


def gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that processes started here see, as CUDA names them.

    They are read from CUDA_VISIBLE_DEVICES, or else from nvidia-smi. The list
    is empty if neither tells.

    Raises:
        GpusError: If nvidia-smi does not end.
    """
    if VISIBLE in environ:
        names = [name.strip() for name in environ[VISIBLE].split(",")]
        # CUDA hides all devices after an invalid one.
        end = next((i for i, n in enumerate(names) if n in ("", "-1")), None)
        return names[:end]
    if not shutil.which("nvidia-smi"):
        return []
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            check=False,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise GpusError(
            "The GPUs that workers share can't be found out. Received: no end "
            f"of `nvidia-smi --list-gpus` within {_SECONDS} seconds. Expected: "
            f"a list. Set {VISIBLE}, to an empty text for no GPU, or look "
            "after the driver."
        ) from error
    lines = [x for x in listed.stdout.splitlines() if x.startswith("GPU ")]
    return [str(index) for index in range(len(lines))]


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
