"""The GPUs and the driver of this machine, as nvidia-smi names them."""

import os
import platform
import shutil
import subprocess

_FIELDS = "name,driver_version,memory.total,compute_cap"


def gpus():
    """Returns a dict for each GPU; none without nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(
        ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader"],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    return [_gpu(line) for line in listed.stdout.splitlines() if "," in line]


def _gpu(line):
    name, driver, memory, capability = (
        part.strip() for part in line.split(",")
    )
    size, unit = memory.split()
    assert unit == "MiB"
    return {
        "name": name,
        "driver": driver,
        "bytes": int(size) * 2**20,
        "compute capability": capability,
    }


def described():
    """Returns what a report says of the machine."""
    return {
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
