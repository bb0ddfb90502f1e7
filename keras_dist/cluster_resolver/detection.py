"""`detect`, which finds the resolver that fits, and unions of resolvers."""

import contextlib
import os
from collections.abc import Callable
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any
from typing import NamedTuple

from keras_dist.cluster_resolver import environment
from keras_dist.cluster_resolver import mpi
from keras_dist.cluster_resolver.base import ClusterResolver
from keras_dist.cluster_resolver.environment import EnvironmentResolver
from keras_dist.cluster_resolver.environment import KerasDistClusterResolver
from keras_dist.cluster_resolver.environment import TFConfigClusterResolver
from keras_dist.cluster_resolver.environment import TorchrunClusterResolver
from keras_dist.cluster_resolver.environment import rank_below
from keras_dist.cluster_resolver.mpi import MPIClusterResolver
from keras_dist.cluster_resolver.slurm import SlurmClusterResolver
from keras_dist.cluster_resolver.spec import ClusterSpec
from keras_dist.cluster_resolver.tasks import cluster_of
from keras_dist.errors import ClusterError

_OVERRIDES = ("rpc_layer", "task_type", "task_id")


class UnionResolver(ClusterResolver):
    """A resolver with the tasks of several resolvers.

    Everything but the tasks is taken from the first resolver. Where several
    resolvers have the same job, their lists of addresses are concatenated in
    order. If one of them gives its tasks by index, all are merged by index.

    Args:
        *args: `ClusterResolver`s, at least one.
        **kwargs: `task_type`, `task_id` and `rpc_layer`, each in place of the
            first resolver's.

    Raises:
        TypeError: If an argument is no `ClusterResolver`.
        ClusterError: If there is no resolver, or a keyword is unknown.

    Example:

    >>> from keras_dist.cluster_resolver import ClusterSpec
    >>> from keras_dist.cluster_resolver import SimpleClusterResolver
    >>> from keras_dist.cluster_resolver import UnionResolver
    >>> here, there = [
    ...     SimpleClusterResolver(ClusterSpec({"worker": [address]}))
    ...     for address in ("10.0.0.1:9000", "10.0.0.2:9000")
    ... ]
    >>> union = UnionResolver(here, there, task_type="worker", task_id=0)
    >>> union.cluster_spec()
    ClusterSpec({'worker': ['10.0.0.1:9000', '10.0.0.2:9000']})
    """

    def __init__(self, *args: ClusterResolver, **kwargs: Any) -> None:
        unknown = sorted(kwargs.keys() - set(_OVERRIDES))
        if unknown:
            raise ClusterError(
                f"Unexpected keyword arguments. Received: {', '.join(unknown)}."
                f" Expected: some of {', '.join(_OVERRIDES)}."
            )
        if not args:
            raise ClusterError("At least one ClusterResolver is required.")
        for resolver in args:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    "All arguments must be ClusterResolvers. Received: "
                    f"{resolver!r} of type {type(resolver).__name__}."
                )
        self._resolvers = args
        self.task_type = kwargs.get("task_type")
        self.task_id = kwargs.get("task_id")
        self.rpc_layer = kwargs.get("rpc_layer")

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of all resolvers.

        Raises:
            KeyError: If two resolvers give the same task index of a job.
        """
        by_job: dict[str, list[Any]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                by_job.setdefault(job, []).append(tasks)
        return ClusterSpec(
            {job: _joined(job, several) for job, several in by_job.items()}
        )

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the given task's address, else the first one's master."""
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer)
        return self.address_of(task_type, task_id, rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Returns the first resolver's number of accelerators, by type."""
        return self._resolvers[0].num_accelerators(
            task_type, task_id, config_proto
        )

    @property
    def environment(self) -> str | None:
        """The first resolver's environment."""
        return self._resolvers[0].environment

    @property
    def coordinator(self) -> str | None:
        """The first resolver's coordinator."""
        return self._resolvers[0].coordinator

    @property
    def restarts(self) -> int:
        """The first resolver's number of restarts."""
        return self._resolvers[0].restarts

    def own_task(self) -> tuple[str | None, int | None]:
        """Returns the first resolver's task type and index."""
        first = self._resolvers[0]
        return first.task_type, first.task_id

    def own_rpc_layer(self) -> str | None:
        """Returns the first resolver's protocol."""
        return self._resolvers[0].rpc_layer


def _joined(job: str, several: list[Any]) -> Any:
    several = [tasks for tasks in several if tasks]
    if all(isinstance(tasks, list) for tasks in several):
        return [address for tasks in several for address in tasks]
    merged: dict[int, str] = {}
    for tasks in several:
        if isinstance(tasks, list):
            tasks = dict(enumerate(tasks))
        twice = sorted(merged.keys() & tasks.keys())
        if twice:
            raise KeyError(
                "Duplicate keys detected when merging two ClusterSpecs: tasks "
                f"{twice} of job {job!r}. Give each task to one resolver only."
            )
        merged.update(tasks)
    return merged


_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Environ = MutableMapping[str, str]


@dataclass(frozen=True)
class Place:
    """A process' position among the workers that a launcher started."""

    index: int
    number: int
    role: str = ""

    def __str__(self) -> str:
        number = "1 worker" if self.number == 1 else f"{self.number} workers"
        return self.role or f"{number}, this is worker {self.index}"


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
        reason += f"; passed over: {also_found}"
        other_told = _quietly(other, environ)
        if other_told != told:
            reason += f", which says otherwise ({other_told})"
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
    if environ.get(environment.VARIABLE):
        reason += f" ({environment.VARIABLE} is, but has no cluster)"
    tasks = environ.get("SLURM_NTASKS", "")
    if tasks.isdecimal() and int(tasks) > 1 and "SLURM_PROCID" in environ:
        reason += (
            f" (SLURM_NTASKS is {tasks}, but this is not one of the tasks of a "
            "step: start the script with `srun`)"
        )
    return reason


def _quietly(source: _Source, environ: Environ) -> str:
    try:
        return str(source.place(environ))
    except ClusterError as error:
        return f"it can't be read: {error}"


def _keras_dist_found(environ: Environ) -> str:
    name = environment.WORKERS
    return f"{name} is set" if environ.get(name) else ""


def _keras_dist_place(environ: Environ) -> Place:
    resolver = KerasDistClusterResolver.reading(environ)
    return Place(resolver.index(), len(resolver.addresses()))


def _tf_config_found(environ: Environ) -> str:
    resolver = TFConfigClusterResolver.reading(environ)
    with contextlib.suppress(ClusterError):
        if not resolver.cluster_spec():
            return ""
    return f"{environment.VARIABLE} is set"


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


def _torchrun_place(environ: Environ) -> Place:
    return Place(*rank_below(environ, "RANK", "WORLD_SIZE", "torchrun"))


def _slurm_found(environ: Environ) -> str:
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    # mpirun may start its daemons in a Slurm step, whose variables its
    # workers inherit.
    is_mpirun = environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1"
    if environ.get("SLURM_PROCID") and tasks not in ("", "1") and not is_mpirun:
        return "SLURM_PROCID is set, in a step of several tasks"
    return ""


def _slurm_place(environ: Environ) -> Place:
    return Place(
        *rank_below(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "srun")
    )


def _mpi_found(environ: Environ) -> str:
    for rank, size in mpi.RANKS:
        if environ.get(size, "1") != "1":
            return f"MPI's {rank} and {size} are set"
    return ""


def _mpi_place(environ: Environ) -> Place:
    return Place(*mpi.place(environ))


_SOURCES = (
    _Source(_keras_dist_found, _keras_dist_place, KerasDistClusterResolver),
    _Source(_tf_config_found, _tf_config_place, TFConfigClusterResolver),
    _Source(_torchrun_found, _torchrun_place, TorchrunClusterResolver),
    _Source(_slurm_found, _slurm_place, SlurmClusterResolver),
    _Source(_mpi_found, _mpi_place, MPIClusterResolver),
)
