"""SlurmClusterResolver: the tasks that `srun` started."""

import re
from collections.abc import Mapping
from collections.abc import MutableMapping
from typing import NamedTuple

from keras_dist.cluster_resolver.environment import EnvironmentResolver
from keras_dist.cluster_resolver.environment import Place
from keras_dist.cluster_resolver.environment import host_port
from keras_dist.cluster_resolver.environment import integer
from keras_dist.cluster_resolver.environment import job_port
from keras_dist.cluster_resolver.environment import rank_below
from keras_dist.cluster_resolver.spec import ClusterSpec
from keras_dist.environment.hostlist import hosts_of
from keras_dist.environment.machine import VISIBLE
from keras_dist.environment.machine import listed_gpus
from keras_dist.environment.machine import visible_gpus
from keras_dist.errors import ClusterError

# The default of `tf.distribute`.
_DEFAULT_PORT = 8888
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Expands Slurm's short form of a list of hosts.

    Args:
        hostlist: String, such as the value of SLURM_STEP_NODELIST.

    Returns:
        List of strings, the hosts in the same order. Leading zeros of numbers
        and repeated hosts are kept.

    Raises:
        ClusterError: If the string can't be read.

    Example:

    >>> from keras_dist.cluster_resolver import expand_hostlist
    >>> expand_hostlist("n[08-10,12],login1")
    ['n08', 'n09', 'n10', 'n12', 'login1']
    """
    try:
        return list(hosts_of(hostlist))
    except ValueError:
        raise ClusterError(
            f"Invalid list of hosts. Received: {hostlist!r}. Expected: a form "
            "such as 'n[1-2],m5'."
        ) from None


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Expands Slurm's short form of the numbers of tasks on each node.

    Args:
        tasks_per_node: String, such as the value of
            SLURM_STEP_TASKS_PER_NODE.

    Returns:
        List of integers, one for each node.

    Raises:
        ClusterError: If the string can't be read.

    Example:

    >>> from keras_dist.cluster_resolver import expand_tasks_per_node
    >>> expand_tasks_per_node("3(x2),1")
    [3, 3, 1]
    """
    tasks = []
    for part in tasks_per_node.split(","):
        match = _TASKS.fullmatch(part)
        if not match:
            raise ClusterError(
                "Invalid list of tasks per node. Received: "
                f"{tasks_per_node!r}. Expected: a form such as '3(x2),2,1'."
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def count_gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of this node's GPUs that the step may use."""
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdecimal():
        return int(on_node)
    visible = visible_gpus(environ)
    if visible is not None:
        return len(visible)
    count, failed = listed_gpus()
    if failed is not None:
        raise RuntimeError(
            "Could not get the number of GPUs from nvidia-smi. Pass "
            f"`gpus_per_node`, or set {VISIBLE}. Its output was: {failed!r}."
        )
    return count


def own_gpus(
    environ: Mapping[str, str],
    gpus_per_node: int,
    gpus_per_task: int,
    local_rank: int,
) -> str | None:
    """Returns a task's CUDA_VISIBLE_DEVICES; `None` to leave it as it is."""
    visible = visible_gpus(environ)
    if not visible and not environ.get(VISIBLE):
        visible = [str(i) for i in range(gpus_per_node)]
    if not visible:  # -1 hides them all
        return None
    if len(visible) != gpus_per_node:  # the task has its own already
        return None
    start = local_rank * gpus_per_task
    return ",".join(visible[start : start + gpus_per_task])


class _Slot(NamedTuple):
    host: str
    local_rank: int


class SlurmClusterResolver(EnvironmentResolver):
    """A resolver for the tasks that `srun` started, on any backend.

    Hosts are in the order of the step's node list. Slurm's ranks have the same
    order if it fills node after node (`--distribution=block`, its default);
    with another distribution, an error is raised. The tasks of a node get the
    ports `port_base`, `port_base + 1` and so on. Jobs, sorted by name, get
    consecutive tasks.

    It reads the environment variables `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`,
    `SLURM_STEP_NODELIST` and `SLURM_STEP_TASKS_PER_NODE` when it is created,
    and `SLURM_JOB_ID`, `SLURM_STEP_ID` and `SLURM_RESTART_COUNT`, if set.

    Args:
        jobs: Dict from the names of jobs to their numbers of tasks. By
            default all tasks are `worker`s.
        port_base: Integer, the first port on each node. By default one
            between 10240 and 26623 that is computed from the ids of the job
            and the step, so that those which share a node have ports of their
            own; 8888, the default of `tf.distribute`, without a job's id.
        gpus_per_node: Integer. By default the number in `SLURM_GPUS_ON_NODE`,
            else of `CUDA_VISIBLE_DEVICES`, else of nvidia-smi; 0 without any.
        gpus_per_task: Integer. By default a node's GPUs are shared evenly.
        tasks_per_node: Integer, or dict from hosts to integers. By default
            the numbers in `SLURM_STEP_TASKS_PER_NODE`.
        auto_set_gpu: Boolean. If true, `cluster_spec()` sets
            `CUDA_VISIBLE_DEVICES` to this task's GPUs, unless the task has
            none, or Slurm has assigned its own already. It has no effect once
            the framework uses a GPU.
        rpc_layer: String, the protocol that `master` puts before addresses.

    Raises:
        RuntimeError: Outside of a step, or if the arguments ask for more tasks
            or GPUs than there are.
        ClusterError: If a variable can't be read.

    Example:

    >>> from keras_dist.cluster_resolver import SlurmClusterResolver
    >>> resolver = SlurmClusterResolver.reading({
    ...     "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3",
    ...     "SLURM_STEP_NODELIST": "n[1-2]",
    ...     "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_GPUS_ON_NODE": "0",
    ... })
    >>> resolver.cluster_spec().job_tasks("worker"), resolver.get_task_info()
    (['n1:8888', 'n1:8889', 'n2:8888'], ('worker', 2))
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int | None = None,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        self._rank = self._number("SLURM_PROCID")
        self._jobs = (
            {"worker": self._number("SLURM_STEP_NUM_TASKS")}
            if jobs is None
            else dict(jobs)
        )
        self.rpc_layer = rpc_layer
        by_host = self._tasks_by_host(tasks_per_node)
        self._port_base = (
            self._job_port(max(by_host.values()))
            if port_base is None
            else port_base
        )
        self._places = [
            _Slot(host, local_rank)
            for host, number in by_host.items()
            for local_rank in range(number)
        ]
        self._check_tasks(sum(self._jobs.values()))
        if not isinstance(tasks_per_node, Mapping):
            self._check_place()
        self._set_gpus(
            gpus_per_node, gpus_per_task, max(by_host.values()), auto_set_gpu
        )

    @classmethod
    def _evidence(cls, environ: MutableMapping[str, str]) -> str:
        tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
        # mpirun may start its daemons in a Slurm step, whose variables its
        # workers inherit.
        is_mpirun = environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1"
        is_task = environ.get("SLURM_PROCID") and tasks not in ("", "1")
        if is_task and not is_mpirun:
            return "SLURM_PROCID is set in a step of several tasks"
        return ""

    @classmethod
    def _place(cls, environ: MutableMapping[str, str]) -> Place:
        return rank_below(
            environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "srun"
        )

    def cluster_spec(self) -> ClusterSpec:
        """Returns the step's tasks by job; may set `CUDA_VISIBLE_DEVICES`."""
        if self._own_gpus is not None:
            self._environ[VISIBLE] = self._own_gpus
        spec, first = {}, 0
        for job, number in sorted(self._jobs.items()):
            spec[job] = [
                host_port(
                    place.host,
                    self._port_base + place.local_rank,
                    f"port_base={self._port_base}",
                )
                for place in self._places[first : first + number]
            ]
            first += number
        return ClusterSpec(spec)

    @property
    def job(self) -> str:
        """Slurm's job and step, by their ids; empty without an id."""
        name, step = self._ids()
        again = self._environ.get("SLURM_RESTART_COUNT", "0")
        return name and f"SLURM job {name}, step {step}, restart {again}"

    def _ids(self) -> tuple[str, str]:
        """Returns the ids of the job and of the step, empty without one."""
        job, step = (
            self._environ.get(f"SLURM_{name}_ID", "")
            for name in ("JOB", "STEP")
        )
        return job, step

    def _job_port(self, count: int) -> int:
        job, step = self._ids()
        if not job:
            return _DEFAULT_PORT
        # Neither a job's steps nor jobs that follow each other share ports.
        numbers = [int(text) if text.isdecimal() else 0 for text in (job, step)]
        return job_port(numbers[0] * 101 + numbers[1], count)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the type and index of this process' task."""
        return self.task_type, self.task_id

    def own_task(self) -> tuple[str | None, int | None]:
        """Returns the type and index of the task with rank `SLURM_PROCID`."""
        index = self._rank
        for job, number in sorted(self._jobs.items()):
            if index < number:
                return job, index
            index -= number
        return None, None

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the number of GPUs of each task."""
        return {"GPU": self._gpus_per_task}

    def _variable(self, name: str) -> str:
        if not self._environ.get(name):
            raise RuntimeError(
                f"{name} not found in environment. Not running inside a SLURM "
                "step? Start the script with `srun`."
            )
        return self._environ[name]

    def _number(self, name: str) -> int:
        self._variable(name)
        return integer(self._environ, name, "srun")

    def _tasks_by_host(
        self, tasks_per_node: int | Mapping[str, int] | None
    ) -> dict[str, int]:
        if isinstance(tasks_per_node, Mapping):
            nodes = self._environ.get("SLURM_STEP_NODELIST", "")
            known = expand_hostlist(nodes) if nodes else []
            ordered = [host for host in known if host in tasks_per_node]
            ordered += sorted(tasks_per_node.keys() - set(ordered))
            return {host: tasks_per_node[host] for host in ordered}
        hosts = expand_hostlist(self._variable("SLURM_STEP_NODELIST"))
        if tasks_per_node is not None:
            return dict.fromkeys(hosts, int(tasks_per_node))
        name = "SLURM_STEP_TASKS_PER_NODE"
        tasks = expand_tasks_per_node(self._variable(name))
        if len(hosts) != len(tasks):
            raise ClusterError(
                f"SLURM_STEP_NODELIST names {len(hosts)} hosts, but {name} has "
                f"{len(tasks)} numbers. Received: "
                f"{self._environ['SLURM_STEP_NODELIST']!r} and "
                f"{self._environ[name]!r}."
            )
        return dict(zip(hosts, tasks, strict=True))

    def _check_tasks(self, requested: int) -> None:
        if requested != len(self._places):
            raise RuntimeError(
                f"Requested {requested} tasks but only {len(self._places)} "
                "were assigned."
            )
        if self._rank >= requested:
            raise ClusterError(
                f"SLURM_PROCID={self._rank} does not fit {requested} tasks. "
                f"Expected: 0 to {requested - 1}."
            )

    def _check_place(self) -> None:
        node = self._environ.get("SLURM_NODEID", "")
        local_rank = self._environ.get("SLURM_LOCALID", "")
        hosts = list(dict.fromkeys(place.host for place in self._places))
        if not (node.isdecimal() and local_rank.isdecimal()):
            return
        place = self._places[self._rank]
        if (hosts.index(place.host), place.local_rank) != (
            int(node),
            int(local_rank),
        ):
            raise ClusterError(
                f"SLURM_PROCID={self._rank} should be task {place.local_rank} "
                f"of node {hosts.index(place.host)}, but it is task "
                f"{local_rank} of node {node}. Start the step with `srun "
                "--distribution=block`."
            )

    def _set_gpus(
        self,
        per_node: int | None,
        per_task: int | None,
        tasks: int,
        auto_set_gpu: bool,
    ) -> None:
        if per_node is None:
            per_node = count_gpus(self._environ)
        if per_task is None:
            per_task = per_node // tasks
        if tasks * per_task > per_node:
            raise RuntimeError(
                f"Requested more GPUs per node than available: {tasks} tasks "
                f"of {per_task} GPUs, on nodes of {per_node}."
            )
        self._gpus_per_task = per_task
        self._own_gpus: str | None = None
        if auto_set_gpu and per_task:
            self._own_gpus = own_gpus(
                self._environ,
                per_node,
                per_task,
                self._places[self._rank].local_rank,
            )
