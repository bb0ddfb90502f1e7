"""The environment variables of each worker."""

import os
from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path

from keras_dist.environment.gpus import VISIBLE
from keras_dist.launch.addresses import Addresses

COORDINATOR_VARIABLE = "KERAS_DIST_COORDINATOR"

JOINED_VARIABLE = "KERAS_DIST_JOINED_FILE"

THREADS_VARIABLE = "OMP_NUM_THREADS"


def worker_environment(
    inherited: Mapping[str, str],
    index: int,
    addresses: Addresses,
    has_coordinator: bool,
    restarts: int,
    devices: int | None,
    own_gpus: Sequence[str] = (),
    joined: Path | None = None,
) -> dict[str, str]:
    """Returns the environment of one worker.

    Variables of other launchers are left as they are, because strategies look
    for those of keras_dist first. `devices` is the number of virtual CPU
    devices, and `own_gpus` names the GPUs that the worker sees; `None` and an
    empty sequence leave what is inherited. `joined` is a file that the worker
    makes once it has joined the others.
    """
    environment = dict(inherited)
    environment["KERAS_DIST_WORKERS"] = ",".join(addresses.workers)
    environment["KERAS_DIST_WORKER_INDEX"] = str(index)
    environment["KERAS_DIST_RESTARTS"] = str(restarts)
    for name in (COORDINATOR_VARIABLE, JOINED_VARIABLE):
        environment.pop(name, None)
    if joined is not None:
        environment[JOINED_VARIABLE] = str(joined)
    if has_coordinator:
        environment[COORDINATOR_VARIABLE] = addresses.coordinator
    if devices is not None:
        environment["KERAS_DIST_VIRTUAL_DEVICES"] = str(devices)
    if own_gpus:
        environment[VISIBLE] = ",".join(own_gpus)
    # Lines are shown when they are written, not when a buffer is full.
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


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
    if num_local == 1 or environment.get(THREADS_VARIABLE):
        return environment, None
    cores = num_cores()
    threads = max(1, cores // num_local)
    environment[THREADS_VARIABLE] = str(threads)
    return environment, (
        f"each worker gets {THREADS_VARIABLE}={threads} ({cores} cores, "
        f"{num_local} workers here); set it to choose another number"
    )
