"""`detect`, which finds the resolver that fits the environment variables."""

import contextlib
import os
from collections.abc import MutableMapping

from keras_dist.cluster_resolver.base import ClusterResolver
from keras_dist.cluster_resolver.environment import EnvironmentResolver
from keras_dist.cluster_resolver.environment import Place
from keras_dist.cluster_resolver.environment import TFConfigClusterResolver
from keras_dist.cluster_resolver.launched import KerasDistClusterResolver
from keras_dist.cluster_resolver.launched import MPIClusterResolver
from keras_dist.cluster_resolver.launched import TorchrunClusterResolver
from keras_dist.cluster_resolver.ray_train import RayTrainClusterResolver
from keras_dist.cluster_resolver.slurm import SlurmClusterResolver
from keras_dist.errors import ClusterError

Environ = MutableMapping[str, str]

# The first whose launcher is recognized is chosen.
_RESOLVERS: tuple[type[EnvironmentResolver], ...] = (
    KerasDistClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    SlurmClusterResolver,
    MPIClusterResolver,
    RayTrainClusterResolver,
)


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
    (resolver, evidence), *others = present
    place_text = str(resolver._place(environ))
    reason = f"{evidence}: {place_text}"
    for other, other_evidence in others:
        reason += f"; ignored: {other_evidence}"
        other_text = _quietly(other, environ)
        if other_text != place_text:
            reason += f", which contradicts it ({other_text})"
    return resolver.reading(environ), reason


def place(environ: Environ = os.environ) -> tuple[Place, str] | None:
    """Returns this process' `Place`, and how its launcher is recognized."""
    for resolver, evidence in _present(environ)[:1]:
        with contextlib.suppress(ClusterError):
            return resolver._place(environ), evidence
    return None


def _present(environ: Environ) -> list[tuple[type[EnvironmentResolver], str]]:
    """Returns the launchers whose variables are set, and how that is known."""
    return [
        (resolver, evidence)
        for resolver in _RESOLVERS
        if (evidence := resolver._evidence(environ))
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


def _quietly(resolver: type[EnvironmentResolver], environ: Environ) -> str:
    try:
        return str(resolver._place(environ))
    except ClusterError as error:
        return f"it can't be read: {error}"
