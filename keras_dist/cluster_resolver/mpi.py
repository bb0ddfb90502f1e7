"""MPIClusterResolver: the workers of an MPI job."""

import zlib
from collections.abc import Mapping

from keras_dist.cluster_resolver.environment import WorkersResolver
from keras_dist.cluster_resolver.environment import host_port
from keras_dist.cluster_resolver.environment import integer
from keras_dist.cluster_resolver.environment import rank_below
from keras_dist.errors import ClusterError

# The variables of Open MPI, then those of MPICH, Intel MPI and others.
RANKS = (
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
_SET_BY = "mpirun"

# Below Linux's ephemeral ports, which begin at 32768.
_FIRST_PORT = 10240
_NUM_PORTS = 20000


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
    between 10240 and 30239 that are computed from the job's id
    (`PMIX_NAMESPACE` or a similar variable). Set `MASTER_PORT` if those are in
    use.

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

    def addresses(self) -> list[str]:
        """Returns the workers' addresses, empty where they are unknown."""
        _, number = place(self._environ)
        together = self._on_one_host(number)
        host, port = self._leader(together, number)
        known = number if together else 1
        addresses = [
            host_port(
                host, port + i, f"MASTER_PORT={port} with {number} workers"
            )
            for i in range(known)
        ]
        return addresses + [""] * (number - known)

    def index(self) -> int:
        """Returns this worker's rank."""
        return place(self._environ)[0]

    def _on_one_host(self, number: int) -> bool:
        return any(
            self._environ.get(name) == str(number) for name in _LOCAL_SIZES
        )

    def _leader(self, together: bool, number: int) -> tuple[str, int]:
        host = self._environ.get("MASTER_ADDR", "").strip()
        if not host and together:
            host = "127.0.0.1"
        if self._environ.get("MASTER_PORT"):
            port = integer(self._environ, "MASTER_PORT", "you", 1, 65535)
        else:
            port = self._job_port(number) if together else 0
        if not host or not port:
            raise ClusterError(
                f"MPI started {number} workers, but does not say where they "
                "meet. Set MASTER_ADDR (the host of rank 0) and MASTER_PORT "
                "(a free port there) for all of them: with Open MPI `mpirun "
                "-x MASTER_ADDR=... -x MASTER_PORT=...`, with MPICH `mpiexec "
                "-genv MASTER_ADDR ... -genv MASTER_PORT ...`. They may only "
                "be absent where all workers are on one host and the job has "
                f"an id ({', '.join(_JOB_IDS)}; MPICH gives none)."
            )
        return host, port

    def _job_port(self, number: int) -> int:
        ids = [
            self._environ[name] for name in _JOB_IDS if name in self._environ
        ]
        if not ids:
            return 0
        room = max(1, _NUM_PORTS - number)
        return _FIRST_PORT + zlib.crc32(ids[0].encode()) % room


def place(environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns this process' rank and the number of ranks."""
    for rank, size in RANKS:
        if rank in environ or size in environ:
            return rank_below(environ, rank, size, _SET_BY)
    raise ClusterError(
        "This process was not started by MPI as far as its variables tell. "
        f"Expected: {' or '.join(' and '.join(pair) for pair in RANKS)}"
        + (
            ". PMIX_RANK is set, but it does not say how many workers there "
            "are: set PMI_RANK and PMI_SIZE."
            if "PMIX_RANK" in environ
            else "."
        )
    )
