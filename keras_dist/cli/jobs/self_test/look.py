"""A description of a backend's process."""

from typing import Any

import keras

from keras_dist.cluster_resolver import detect
from keras_dist.cluster_resolver.tasks import cluster_of
from keras_dist.errors import KerasDistError
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.backend import list_devices
from keras_dist.plugin.powers import ShardsOptimizerState


def look() -> dict[str, Any]:
    """Returns the backend, its devices and the cluster, in types that JSON has.

    If the cluster can't be read, `"cluster"` has the reason under `"error"`.
    """
    return {
        "backend": keras.backend.backend(),
        "keras": keras.__version__,
        "devices": list_devices(),
        "shards_optimizer": isinstance(get_backend(), ShardsOptimizerState),
        "cluster": _cluster(),
    }


def _cluster() -> dict[str, Any]:
    try:
        resolver, reason = detect()
        cluster = None if resolver is None else cluster_of(resolver)
    except (KerasDistError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "reason": reason,
        "resolver": None if resolver is None else type(resolver).__name__,
        "workers": 1 if cluster is None else cluster.num_workers,
        "index": 0 if cluster is None else cluster.index,
    }
