"""RayTrainClusterResolver: the workers of a trainer of Ray Train."""

import functools
import importlib
import os
import socket
import sys
from collections.abc import MutableMapping
from typing import Any

from keras_dist.cluster_resolver.environment import Place
from keras_dist.cluster_resolver.environment import host_port
from keras_dist.cluster_resolver.launched import WorkersResolver
from keras_dist.errors import ClusterError


class RayTrainClusterResolver(WorkersResolver):
    """A resolver for the workers of Ray Train, on JAX and PyTorch.

    Ray's `TorchTrainer` and `TensorflowTrainer` set the variables of torchrun
    and TF_CONFIG, which are used first. Its `JaxTrainer` sets none. There, the
    first worker chooses a free port of its host, and tells its address to the
    others with `ray.train.collective`. The other addresses are empty, so
    TensorFlow's workers can't use this resolver.

    All workers have to call `cluster_spec()`, as a
    `MultiWorkerMirroredStrategy` does. They exchange the address once.

    Raises:
        ClusterError: From methods outside of a worker of Ray Train, or if this
            version of Ray has no `ray.train.collective`.

    Example:

    >>> from keras_dist.cluster_resolver import RayTrainClusterResolver
    >>> try:
    ...     RayTrainClusterResolver().task_id
    ... except keras_dist.ClusterError as error:
    ...     print(str(error).split(".")[0])
    This process is not a worker of Ray Train
    """

    @classmethod
    def _evidence(cls, environ: MutableMapping[str, str]) -> str:
        context = _context() if environ is os.environ else None
        if context is None or (context.get_world_size() or 1) == 1:
            return ""
        return "this is a worker of Ray Train"

    @classmethod
    def _place(cls, environ: MutableMapping[str, str]) -> Place:
        context = _context()
        if context is None:
            raise ClusterError(
                "This process is not a worker of Ray Train. Expected: a "
                "function that `fit` of a trainer, such as JaxTrainer, runs "
                "on its workers."
            )
        return Place(context.get_world_rank(), context.get_world_size())

    def addresses(self) -> list[str]:
        """Returns the first worker's address, and empty ones of the others."""
        place = self._place(self._environ)
        return [_leader(place), *[""] * (place.number - 1)]


def _context() -> Any:
    """Returns the context of Ray's worker; `None` in other processes."""
    # A worker has imported it. Importing it elsewhere would take seconds.
    train = sys.modules.get("ray.train")
    try:
        return None if train is None else train.get_context()
    except (RuntimeError, DeprecationWarning):  # the driver's, or one of Tune's
        return None


@functools.cache
def _leader(place: Place) -> str:
    """Returns the first worker's address, which it tells the others once."""
    try:
        collective: Any = importlib.import_module("ray.train.collective")
    except ImportError as error:
        raise ClusterError(
            "This version of Ray has no `ray.train.collective`, with which "
            "workers tell each other their addresses. Install a newer one, or "
            "set KERAS_DIST_WORKERS and KERAS_DIST_WORKER_INDEX on each worker."
        ) from error
    address = None
    if place.index == 0:
        util: Any = importlib.import_module("ray.util")
        host = util.get_node_ip_address()
        address = host_port(host, _free_port(host), "Ray's first worker")
    return str(collective.broadcast_from_rank_zero(address))


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        return int(listener.getsockname()[1])
