"""Resolvers of workers that a launcher started: ours, torchrun and MPI."""

import zlib
from abc import abstractmethod
from collections.abc import MutableMapping

from keras_dist.cluster_resolver.environment import EnvironmentResolver
from keras_dist.cluster_resolver.environment import Place
from keras_dist.cluster_resolver.environment import host_port
from keras_dist.cluster_resolver.environment import integer
from keras_dist.cluster_resolver.environment import job_port
from keras_dist.cluster_resolver.environment import rank_below
from keras_dist.cluster_resolver.environment import required
from keras_dist.cluster_resolver.spec import ClusterSpec
from keras_dist.environment.machine import VISIBLE
from keras_dist.environment.machine import gpus
from keras_dist.environment.machine import share
from keras_dist.errors import ClusterError

# Set to the GPUs that a resolver has left this process.
_TAKEN = "KERAS_DIST_OWN_GPUS"


class WorkersResolver(EnvironmentResolver):
    """A resolver for numbered workers, the tasks of one job, `worker`."""

    # Names of variables with a worker's position on its host, and with the
    # number of workers there, where the launcher leaves all GPUs to each.
    _local: tuple[tuple[str, str], ...] = ()

    def cluster_spec(self) -> ClusterSpec:
        """Returns the workers, as the job `worker`."""
        spec = ClusterSpec({"worker": self.addresses()})
        self._take_own_gpus()
        return spec

    def _take_own_gpus(self) -> None:
        """Hides the GPUs of this host's other workers from the framework."""
        # Resolvers may be asked again, and there may be several of them.
        if self._environ.get(_TAKEN) == self._environ.get(VISIBLE, ""):
            return
        for rank, size in self._local:
            number = self._count(size, "the launcher")
            if number < 2:
                continue
            position = self._count(rank, "the launcher")
            local_gpus = share(gpus(self._environ), position, number)
            if local_gpus:
                self._environ[VISIBLE] = self._environ[_TAKEN] = ",".join(
                    local_gpus
                )
            return

    def own_task(self) -> tuple[str | None, int | None]:
        """Returns `"worker"` and this worker's position."""
        return "worker", self.index()

    @abstractmethod
    def addresses(self) -> list[str]:
        """Returns each worker's `"host:port"` in order, empty if unknown."""

    def index(self) -> int:
        """Returns this worker's position."""
        return self._place(self._environ).index

    def _count(self, name: str, set_by: str) -> int:
        """Returns the integer in a variable, 0 if it is not set."""
        if not self._environ.get(name):
            return 0
        return integer(self._environ, name, set_by)

    def _on_one_host(self, number: int, *names: str) -> bool:
        """Returns true if a variable says that this host has all workers."""
        return any(self._environ.get(name) == str(number) for name in names)


def _from_leader(
    host: str, port: int, number: int, on_one_host: bool
) -> list[str]:
    """Returns consecutive ports of the leader's host; "" on other hosts."""
    known = number if on_one_host else 1
    ports = f"MASTER_PORT={port} with {number} workers"
    addresses = [host_port(host, port + i, ports) for i in range(known)]
    return addresses + [""] * (number - known)


_BY_TORCHRUN = "torchrun"
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchrunClusterResolver(WorkersResolver):
    """A resolver for workers that torchrun started, on any backend.

    It reads the environment variables `RANK`, `WORLD_SIZE`,
    `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`, `TORCHELASTIC_RUN_ID` and
    `TORCHELASTIC_RESTART_COUNT`. torchrun itself listens at `MASTER_PORT`.
    Workers use ports between 10240 and 26623 that are computed from it, so
    that jobs with neighbouring ports share none. With several hosts, only
    the first worker's host is known, and the other addresses are empty. Its
    port is then `10240 + MASTER_PORT % 16384`.

    torchrun shows all GPUs of a host to each of its workers. If there are as
    many as workers, or more, `cluster_spec()` sets `CUDA_VISIBLE_DEVICES` to
    this worker's share, by `LOCAL_RANK`. It has no effect once the framework
    uses a GPU.

    Raises:
        ClusterError: From methods that need a variable that is absent or
            can't be read.

    Example:

    >>> from keras_dist.cluster_resolver import TorchrunClusterResolver
    >>> resolver = TorchrunClusterResolver.reading({
    ...     "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
    ...     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    ... })
    >>> resolver.cluster_spec()
    ClusterSpec({'worker': ['127.0.0.1:20088', '127.0.0.1:20089']})
    """

    _local = (("LOCAL_RANK", "LOCAL_WORLD_SIZE"),)

    @classmethod
    def _evidence(cls, environ: MutableMapping[str, str]) -> str:
        if all(environ.get(name) for name in _TORCHRUN):
            return "torchrun's RANK and WORLD_SIZE are set"
        return ""

    @classmethod
    def _place(cls, environ: MutableMapping[str, str]) -> Place:
        return rank_below(environ, "RANK", "WORLD_SIZE", _BY_TORCHRUN)

    def addresses(self) -> list[str]:
        """Returns the workers' addresses, empty where they are unknown."""
        number = self._place(self._environ).number
        host = required(self._environ, "MASTER_ADDR", _BY_TORCHRUN)
        port = integer(self._environ, "MASTER_PORT", _BY_TORCHRUN, 1, 65535)
        on_one_host = self._on_one_host(number, "LOCAL_WORLD_SIZE")
        first = job_port(port, number if on_one_host else 1)
        return _from_leader(host, first, number, on_one_host)

    @property
    def restarts(self) -> int:
        """Number of times that torchrun restarted the workers."""
        return self._count("TORCHELASTIC_RESTART_COUNT", _BY_TORCHRUN)

    @property
    def job(self) -> str:
        """torchrun's run, by its id and its port."""
        name = self._environ.get("TORCHELASTIC_RUN_ID", "")
        port = self._environ.get("MASTER_PORT", "")
        word = f"torchrun {name!r} at port {port}"
        number = self._place(self._environ).number
        if self._on_one_host(number, "LOCAL_WORLD_SIZE"):
            # The agents of several hosts may count restarts differently.
            word += f", restart {self.restarts}"
        return word


WORKERS = "KERAS_DIST_WORKERS"
INDEX = "KERAS_DIST_WORKER_INDEX"
COORDINATOR = "KERAS_DIST_COORDINATOR"
JOB = "KERAS_DIST_JOB"
RESTARTS = "KERAS_DIST_RESTARTS"
_BY_KERAS_DIST = (
    "`keras-dist run`; if you start workers yourself, set "
    f"{WORKERS}=host:port,host:port and {INDEX}=0, 1, ..."
)


class KerasDistClusterResolver(WorkersResolver):
    """A resolver for workers that `keras-dist run` started.

    The environment variable `KERAS_DIST_WORKERS` has all workers' addresses,
    separated by commas and chief first; `KERAS_DIST_WORKER_INDEX` is this
    worker's position. `KERAS_DIST_COORDINATOR`, if set, is the address of the
    rendezvous. `KERAS_DIST_RESTARTS` is the number of times that the workers
    were restarted. `KERAS_DIST_JOB`, if set, is a word of this start: workers
    with another one are refused.

    Raises:
        ClusterError: From methods that need a variable that is absent or
            can't be read.

    Example:

    >>> from keras_dist.cluster_resolver import KerasDistClusterResolver
    >>> resolver = KerasDistClusterResolver.reading({
    ...     "KERAS_DIST_WORKERS": "10.0.0.1:9000,10.0.0.2:9000",
    ...     "KERAS_DIST_WORKER_INDEX": "0",
    ... })
    >>> resolver.task_type, resolver.task_id
    ('worker', 0)
    """

    @classmethod
    def _evidence(cls, environ: MutableMapping[str, str]) -> str:
        return f"{WORKERS} is set" if environ.get(WORKERS) else ""

    @classmethod
    def _place(cls, environ: MutableMapping[str, str]) -> Place:
        index = integer(environ, INDEX, _BY_KERAS_DIST)
        number = len(cls.reading(environ).addresses())
        if index >= number:
            raise ClusterError(
                f"{INDEX}={index} does not fit {WORKERS}, which names {number} "
                f"workers. Expected: 0 to {number - 1}."
            )
        return Place(index, number)

    def addresses(self) -> list[str]:
        """Returns the workers' addresses."""
        value = required(self._environ, WORKERS, _BY_KERAS_DIST)
        addresses = [address.strip() for address in value.split(",")]
        if not all(addresses):
            raise ClusterError(
                f"{WORKERS} must be addresses 'host:port', separated by "
                f"commas. Received: {value!r}."
            )
        return addresses

    @property
    def coordinator(self) -> str | None:
        """The address in `KERAS_DIST_COORDINATOR`; `None` if it is not set."""
        return self._environ.get(COORDINATOR, "").strip() or None

    @property
    def restarts(self) -> int:
        """The number in `KERAS_DIST_RESTARTS`; 0 if it is not set."""
        return self._count(RESTARTS, _BY_KERAS_DIST)

    @property
    def job(self) -> str:
        """The word in `KERAS_DIST_JOB`, or `""`."""
        return self._environ.get(JOB, "").strip()


# The variables of Open MPI, then those of MPICH, Intel MPI and others.
_RANKS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_JOB_IDS = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "OMPI_MCA_orte_ess_jobid",
    "PMI_JOBID",
)


class MPIClusterResolver(WorkersResolver):
    """A resolver for workers that mpirun or mpiexec started.

    It reads environment variables; MPI itself is not used. Ranks come from
    `OMPI_COMM_WORLD_RANK` and `OMPI_COMM_WORLD_SIZE` (Open MPI), or from
    `PMI_RANK` and `PMI_SIZE` (MPICH, Intel MPI). `PMIX_RANK` alone is not
    enough, since it comes without a size.

    If all workers are on one host, worker `i` is given port `MASTER_PORT + i`
    on host `MASTER_ADDR`. If not, only the first worker's address is known,
    and the others are empty. If all workers are on this host, as
    `OMPI_COMM_WORLD_LOCAL_SIZE` or `MPI_LOCALNRANKS` says, `MASTER_ADDR` and
    `MASTER_PORT` may be absent. The workers then use loopback, and ports
    between 10240 and 26623 that are computed from the job's id
    (`PMIX_NAMESPACE` or a similar variable). Set `MASTER_PORT` if those are in
    use.

    If all workers of a host see all of its GPUs, `cluster_spec()` sets
    `CUDA_VISIBLE_DEVICES` to this worker's share, by
    `OMPI_COMM_WORLD_LOCAL_RANK` or `MPI_LOCALRANKID`.

    Raises:
        ClusterError: From methods that need variables that are absent or can't
            be read.

    Example:

    >>> from keras_dist.cluster_resolver import MPIClusterResolver
    >>> resolver = MPIClusterResolver.reading({
    ...     "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    ...     "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "9000",
    ... })
    >>> resolver.cluster_spec(), resolver.task_id
    (ClusterSpec({'worker': ['10.0.0.1:9000', '']}), 1)
    """

    _local = (
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    )

    @classmethod
    def _evidence(cls, environ: MutableMapping[str, str]) -> str:
        for rank, size in _RANKS:
            if environ.get(size, "1") != "1":
                return f"MPI's {rank} and {size} are set"
        return ""

    @classmethod
    def _place(cls, environ: MutableMapping[str, str]) -> Place:
        for rank, size in _RANKS:
            if rank in environ or size in environ:
                return rank_below(environ, rank, size, "mpirun")
        raise ClusterError(
            "MPI's variables of rank and size are not set in this process. "
            f"Expected: {' or '.join(map(' and '.join, _RANKS))}"
            + (
                ". PMIX_RANK is set, but it does not say how many workers "
                "there are: set PMI_RANK and PMI_SIZE."
                if "PMIX_RANK" in environ
                else "."
            )
        )

    def addresses(self) -> list[str]:
        """Returns the workers' addresses, empty where they are unknown."""
        number = self._place(self._environ).number
        on_one_host = self._on_one_host(number, *_LOCAL_SIZES)
        host, port = self._leader(on_one_host, number)
        return _from_leader(host, port, number, on_one_host)

    def _leader(self, on_one_host: bool, number: int) -> tuple[str, int]:
        host = self._environ.get("MASTER_ADDR", "").strip()
        if not host and on_one_host:
            host = "127.0.0.1"
        if self._environ.get("MASTER_PORT"):
            port = integer(self._environ, "MASTER_PORT", "you", 1, 65535)
        else:
            has_port = on_one_host and self._id()
            number_of_job = zlib.crc32(self._id().encode())
            port = job_port(number_of_job, number) if has_port else 0
        if not host or not port:
            raise ClusterError(
                f"MPI started {number} workers, but does not say where they "
                "meet.\nSet MASTER_ADDR (the host of rank 0) and MASTER_PORT "
                "(a free port there) for all of them: with Open MPI `mpirun "
                "-x MASTER_ADDR=... -x MASTER_PORT=...`, with MPICH `mpiexec "
                "-genv MASTER_ADDR ... -genv MASTER_PORT ...`. You can leave "
                "them out only if all workers are on one host and the job "
                f"has an id ({', '.join(_JOB_IDS)}; MPICH gives none)."
            )
        return host, port

    def _id(self) -> str:
        """Returns the job's id; empty if MPI gives none."""
        return next(filter(None, map(self._environ.get, _JOB_IDS)), "")

    @property
    def job(self) -> str:
        """MPI's job, by its id; empty without one."""
        return self._id() and f"MPI job {self._id()}"
