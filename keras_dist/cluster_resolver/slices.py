"""The hosts of a TPU's slice, as its environment variables name them."""

import os
from collections.abc import Mapping

from keras_dist.cluster_resolver.simple import SimpleClusterResolver
from keras_dist.cluster_resolver.spec import ClusterSpec
from keras_dist.errors import ClusterError

# The port at which JAX's own workers on TPUs meet.
_PORT = "8482"


def hosts_of_slice(
    environ: Mapping[str, str] = os.environ,
) -> SimpleClusterResolver | None:
    """Returns the workers that TPU_WORKER_HOSTNAMES names, if several."""
    names = environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    if len(names) < 2:
        return None
    addresses = [f"{name.strip()}:{_PORT}" for name in names]
    return SimpleClusterResolver(
        ClusterSpec({"worker": addresses}),
        task_type="worker",
        task_id=worker_id(environ, default=""),
    )


def worker_id(environ: Mapping[str, str], default: str = "0") -> int:
    """Returns the position of this host in its slice."""
    value = environ.get("TPU_WORKER_ID") or default
    if not value.isdecimal():
        raise ClusterError(
            "The environment variable TPU_WORKER_ID must be the position of "
            f"this host among those of the TPU. Received: {value!r}. "
            "Expected: an integer from 0."
        )
    return int(value)
