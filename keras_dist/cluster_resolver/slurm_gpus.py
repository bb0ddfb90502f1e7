"""Which GPUs of a Slurm node are a task's own."""

import shutil
import subprocess
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names; `None` if it is not set."""
    if VISIBLE not in environ:
        return None
    names = []
    for name in environ[VISIBLE].split(","):
        # What follows an invalid one is not visible either.
        if name.strip() in ("", "-1"):
            break
        names.append(name.strip())
    return names


def count_gpus(environ: Mapping[str, str]) -> int:
    """How many GPUs this node has for the step.

    SLURM_GPUS_ON_NODE says it, or CUDA_VISIBLE_DEVICES, or nvidia-smi.

    Args:
        environ: Dict of strings.

    Raises:
        RuntimeError: If nvidia-smi fails or does not end.
    """
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdecimal():
        return int(on_node)
    visible = visible_gpus(environ)
    if visible is not None:
        return len(visible)
    if not shutil.which("nvidia-smi"):
        return 0
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            check=False,
            encoding="utf-8",
            timeout=60,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            "Could not get the number of GPUs: nvidia-smi did not end within "
            f"{error.timeout:g} seconds. Pass `gpus_per_node`, or set "
            f"{VISIBLE}."
        ) from error
    if listed.returncode:
        raise RuntimeError(
            "Could not get the number of GPUs from nvidia-smi. Pass "
            f"`gpus_per_node`, or set {VISIBLE}. Its output was: "
            f"{(listed.stdout + listed.stderr).strip()!r}."
        )
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def own_gpus(
    environ: Mapping[str, str],
    gpus_per_node: int,
    gpus_per_task: int,
    local_rank: int,
) -> str | None:
    """What CUDA_VISIBLE_DEVICES should be for one task of a node.

    Args:
        environ: Dict of strings.
        gpus_per_node: Integer.
        gpus_per_task: Integer.
        local_rank: Integer, the task's position on its node.

    Returns:
        String; `None` if the variable has to stay as it is: it names another
        number of GPUs than the node has, so the task has been given its own.
    """
    visible = visible_gpus(environ) or [str(i) for i in range(gpus_per_node)]
    if len(visible) != gpus_per_node:
        return None
    start = local_rank * gpus_per_task
    return ",".join(visible[start : start + gpus_per_task])
