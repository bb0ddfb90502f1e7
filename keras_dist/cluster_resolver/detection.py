"""`detect`, which finds the resolver that fits the environment variables."""

import contextlib
import os
from collections.abc import Callable
from collections.abc import MutableMapping
from typing import NamedTuple

from keras_dist.cluster_resolver.base import ClusterResolver
from keras_dist.cluster_resolver.environment import EnvironmentResolver
from keras_dist.cluster_resolver.environment import Place
from keras_dist.cluster_resolver.environment import TFConfigClusterResolver
from keras_dist.cluster_resolver.environment import rank_below
from keras_dist.cluster_resolver.launched import MPI_RANKS
from keras_dist.cluster_resolver.launched import WORKERS
from keras_dist.cluster_resolver.launched import KerasDistClusterResolver
from keras_dist.cluster_resolver.launched import MPIClusterResolver
from keras_dist.cluster_resolver.launched import TorchrunClusterResolver
from keras_dist.cluster_resolver.launched import mpi_place
from keras_dist.cluster_resolver.launched import torchrun_place
from keras_dist.cluster_resolver.ray_train import RayTrainClusterResolver
from keras_dist.cluster_resolver.ray_train import is_ray_worker
from keras_dist.cluster_resolver.ray_train import ray_place
from keras_dist.cluster_resolver.slurm import SlurmClusterResolver
from keras_dist.cluster_resolver.tasks import cluster_of
from keras_dist.errors import ClusterError

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Environ = MutableMapping[str, str]


class _Source(NamedTuple):
    """A launcher that sets environment variables for the workers."""

    found: Callable[[Environ], str]
    place: Callable[[Environ], Place]
    resolver: type[EnvironmentResolver]


def detect(
    environ: Environ = os.environ,
) -> tuple[ClusterResolver | None, str]:
    """Finds the resolver that fits this process' environment variables.

    The first of these that is present wins: `KERAS_DIST_WORKERS`, `TF_CONFIG`,
    the variables of torchrun, a Slurm step with several tasks (unless Open
    MPI's mpirun started this process in it), an MPI job of several processes.
    Without any of them, a worker of Ray Train is recognized by Ray's context.

    Args:
        environ: Dict of strings, the environment variables; by default those
            of this process.

    Returns:
        Tuple of a `ClusterResolver`, or `None` without a cluster, and a string
        with the reason for the choice.

    Raises:
        ClusterError: If the variables of the first one can't be read.

    Example:

    >>> from keras_dist.cluster_resolver import detect
    >>> resolver, reason = detect({
    ...     "KERAS_DIST_WORKERS": "10.0.0.1:9000,10.0.0.2:9000",
    ...     "KERAS_DIST_WORKER_INDEX": "1",
    ... })
    >>> reason
    'KERAS_DIST_WORKERS is set: 2 workers, this is worker 1'
    """
    present = _present(environ)
    if not present:
        return None, _alone(environ)
    (source, found), *others = present
    told = str(source.place(environ))
    reason = f"{found}: {told}"
    for other, also_found in others:
        reason += f"; ignored: {also_found}"
        other_told = _quietly(other, environ)
        if other_told != told:
            reason += f", which contradicts it ({other_told})"
    return source.resolver.reading(environ), reason


def place(environ: Environ = os.environ) -> tuple[Place, str] | None:
    """Returns this process' `Place`, and how its launcher is recognized."""
    for source, found in _present(environ)[:1]:
        with contextlib.suppress(ClusterError):
            return source.place(environ), found
    return None


def _present(environ: Environ) -> list[tuple[_Source, str]]:
    """Returns the launchers whose variables are set, and how that is known."""
    return [
        (source, found)
        for source in _SOURCES
        if (found := source.found(environ))
    ]


def _alone(environ: Environ) -> str:
    reason = "no variables of a cluster are set: this is the only worker"
    if environ.get("TF_CONFIG"):
        reason += " (TF_CONFIG is set, but it has no cluster)"
    tasks = environ.get("SLURM_NTASKS", "")
    if tasks.isdecimal() and int(tasks) > 1 and "SLURM_PROCID" in environ:
        reason += (
            f" (SLURM_NTASKS is {tasks}, but this process is not a task of a "
            "Slurm step: start the script with `srun`)"
        )
    return reason


def _quietly(source: _Source, environ: Environ) -> str:
    try:
        return str(source.place(environ))
    except ClusterError as error:
        return f"it can't be read: {error}"


def _keras_dist_found(environ: Environ) -> str:
    return f"{WORKERS} is set" if environ.get(WORKERS) else ""


def _keras_dist_place(environ: Environ) -> Place:
    resolver = KerasDistClusterResolver.reading(environ)
    return Place(resolver.index(), len(resolver.addresses()))


def _tf_config_found(environ: Environ) -> str:
    resolver = TFConfigClusterResolver.reading(environ)
    with contextlib.suppress(ClusterError):
        if not resolver.cluster_spec():
            return ""
    return "TF_CONFIG is set"


def _tf_config_place(environ: Environ) -> Place:
    resolver = TFConfigClusterResolver.reading(environ)
    cluster = cluster_of(resolver)
    if cluster is not None:
        return Place(cluster.index, cluster.num_workers)
    if resolver.task_type == "evaluator":
        return Place(0, 1, "this is the evaluator, which works alone")
    return Place(0, 1)


def _torchrun_found(environ: Environ) -> str:
    if all(environ.get(name) for name in _TORCHRUN):
        return "torchrun's RANK and WORLD_SIZE are set"
    return ""


def _slurm_found(environ: Environ) -> str:
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    # mpirun may start its daemons in a Slurm step, whose variables its
    # workers inherit.
    is_mpirun = environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1"
    if environ.get("SLURM_PROCID") and tasks not in ("", "1") and not is_mpirun:
        return "SLURM_PROCID is set in a step of several tasks"
    return ""


def _slurm_place(environ: Environ) -> Place:
    return rank_below(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "srun")


def _mpi_found(environ: Environ) -> str:
    for rank, size in MPI_RANKS:
        if environ.get(size, "1") != "1":
            return f"MPI's {rank} and {size} are set"
    return ""


def _ray_found(environ: Environ) -> str:
    return "this is a worker of Ray Train" if is_ray_worker(environ) else ""


_SOURCES = (
    _Source(_keras_dist_found, _keras_dist_place, KerasDistClusterResolver),
    _Source(_tf_config_found, _tf_config_place, TFConfigClusterResolver),
    _Source(_torchrun_found, torchrun_place, TorchrunClusterResolver),
    _Source(_slurm_found, _slurm_place, SlurmClusterResolver),
    _Source(_mpi_found, mpi_place, MPIClusterResolver),
    _Source(_ray_found, ray_place, RayTrainClusterResolver),
)
