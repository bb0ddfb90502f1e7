"""The GPUs of a Slurm node, and each task's share of them."""

import shutil
import subprocess
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """Returns the GPUs in CUDA_VISIBLE_DEVICES; `None` if it is not set."""
    if VISIBLE not in environ:
        return None
    names = []
    for name in environ[VISIBLE].split(","):
        # CUDA ignores an invalid name and all names after it.
        if name.strip() in ("", "-1"):
            break
        names.append(name.strip())
    return names


def count_gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of this node's GPUs that the step may use.

    It is that of SLURM_GPUS_ON_NODE, else of CUDA_VISIBLE_DEVICES, else of
    nvidia-smi. Raises `RuntimeError` if nvidia-smi fails.
    """
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdecimal():
        return int(on_node)
    visible = visible_gpus(environ)
    if visible is not None:
        return len(visible)
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(
        ["nvidia-smi", "--list-gpus"],
        capture_output=True,
        check=False,
        encoding="utf-8",
        timeout=60,
    )
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
    """Returns CUDA_VISIBLE_DEVICES for the task with a rank on its node.

    The result is `None` if the variable has to stay as it is: if it names
    another number of GPUs than the node has, the task has its own already.
    """
    visible = visible_gpus(environ) or [str(i) for i in range(gpus_per_node)]
    if len(visible) != gpus_per_node:
        return None
    start = local_rank * gpus_per_task
    return ",".join(visible[start : start + gpus_per_task])
