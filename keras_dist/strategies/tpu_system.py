"""The cores of a TPU, and the workers on its hosts."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_dist.cluster_resolver import ClusterResolver
from keras_dist.cluster_resolver import TPUClusterResolver
from keras_dist.cluster_resolver import detect
from keras_dist.cluster_resolver.cloud import VIRTUAL
from keras_dist.cluster_resolver.slices import hosts_of_slice
from keras_dist.core.device import Device
from keras_dist.core.options import CommunicationOptions
from keras_dist.core.plan import Cluster
from keras_dist.core.topology import Topology
from keras_dist.errors import ClusterError
from keras_dist.errors import DeviceError
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.capabilities import HasTPUs
from keras_dist.strategies.multi_worker_mirrored import join_workers

_OTHERWISE = (
    "Elsewhere, use `MirroredStrategy()`, or let CPU devices stand in for the "
    "cores, with `TPUClusterResolver('virtual')` or TPU_NAME=virtual."
)


@dataclass(frozen=True)
class TPUSystem:
    """A TPU that has been found, or CPU devices that stand in for it."""

    resolver: Any
    cluster: Cluster | None
    reason: str  # why there are several workers
    devices: tuple[Device, ...]  # of this worker
    places: Sequence[Sequence[tuple[int, ...]]]  # of the cores of each worker

    @property
    def topology(self) -> Topology:
        """The places of the cores."""
        places = np.array(self.places)
        if len(np.unique(places.reshape(-1, 4), axis=0)) < places[..., 0].size:
            raise DeviceError(
                "Several slices have no topology of their own. Received: "
                f"{places[..., 0].size} cores, of which some have the same "
                "coordinates. Expected: one slice, or a `TPUStrategy` without "
                "a device assignment."
            )
        return Topology(
            mesh_shape=places.max(axis=(0, 1)) + 1, device_coordinates=places
        )


def find_tpus(resolver: Any) -> TPUSystem:
    """Joins the workers on a TPU's hosts, and finds the cores.

    Raises:
        DeviceError: If there are none.
        ClusterError: If cores belong to hosts without a worker.
    """
    resolver = _local() if resolver is None else resolver
    is_tpu = isinstance(resolver, TPUClusterResolver)
    is_virtual = is_tpu and resolver.is_virtual
    if not is_virtual:
        _check_backend()
    workers, reason = resolver, ""
    if is_tpu and not resolver.cluster_spec():
        workers, reason = detect()
        if workers is None:
            workers, reason = hosts_of_slice(), "TPU_WORKER_HOSTNAMES is set"
    cluster = join_workers(workers, CommunicationOptions())
    num_workers = 1 if cluster is None else cluster.num_workers
    kind = "cpu" if is_virtual else "tpu"
    devices = tuple(d for d in get_backend().list_devices() if d.type == kind)
    places = (
        _virtual_places(len(devices), num_workers)
        if is_virtual
        else _places(num_workers)
    )
    return TPUSystem(resolver, cluster, reason, devices, places)


def initialize_tpu_system(
    cluster_resolver: ClusterResolver | None = None,
) -> Topology:
    """Finds a TPU, and returns the places of its cores.

    On several hosts, it connects the workers, so all of them have to call it.
    Nothing is reset: variables keep their values.

    Args:
        cluster_resolver: A `TPUClusterResolver`, another `ClusterResolver` of
            the workers on the TPU's hosts, or `None` for the TPU here.

    Returns:
        A `keras_dist.tpu.experimental.Topology`. Eight CPU devices that stand
        in for a TPU have that of four chips with two cores each.

    Raises:
        DeviceError: If there is no TPU.
        ClusterError: If cores belong to hosts without a worker.

    Example:

    >>> resolver = keras_dist.cluster_resolver.TPUClusterResolver("virtual")
    >>> topology = keras_dist.tpu.experimental.initialize_tpu_system(resolver)
    >>> topology.num_tpus_per_task == len(keras_dist.list_devices("cpu"))
    True
    """
    return find_tpus(cluster_resolver).topology


def _local() -> TPUClusterResolver:
    is_virtual = os.environ.get("TPU_NAME") == VIRTUAL
    return TPUClusterResolver(VIRTUAL if is_virtual else "local")


def _check_backend() -> None:
    if not isinstance(get_backend(), HasTPUs):
        raise DeviceError(
            f"The backend '{keras.backend.backend()}' of keras_dist trains on "
            "no TPUs. Set KERAS_BACKEND=jax. (TensorFlow traces one program "
            "for all cores of a TPU, but keras_dist on TensorFlow traces one "
            f"for each replica.) {_OTHERWISE}"
        )


def _places(num_workers: int) -> Sequence[Sequence[tuple[int, ...]]]:
    backend = get_backend()
    assert isinstance(backend, HasTPUs)
    places = backend.tpu_places()
    if not places:
        names = ", ".join(map(str, backend.list_devices()))
        raise DeviceError(
            f"There is no TPU here. Received: {names}. Expected: tpu:0 and "
            "others, as on a Cloud TPU VM with `pip install 'jax[tpu]'`. "
            f"{_OTHERWISE}"
        )
    counts = [len(host_cores) for host_cores in places]
    if len(counts) != num_workers or len(set(counts)) > 1:
        raise ClusterError(
            "Each host of the TPU needs a worker, and as many cores as the "
            f"others. Received: {num_workers} worker(s), and hosts with "
            f"{counts} cores. Start the program on each host, with "
            "TPU_WORKER_HOSTNAMES and TPU_WORKER_ID, with `keras-dist run`, or "
            "with a resolver that names all hosts."
        )
    return places


def _virtual_places(
    num_devices: int, num_workers: int
) -> list[list[tuple[int, ...]]]:
    """Returns places for CPU devices: chips of two cores, in two columns.

    An odd number of devices is an odd number of chips. The workers' chips are
    next to each other.
    """
    cores = 1 if num_devices % 2 else 2
    columns = 1 if num_devices // cores % 2 else 2
    rows = num_devices // cores // columns
    return [
        [
            (worker * columns + column, row, 0, core)
            for row in range(rows)
            for column in range(columns)
            for core in range(cores)
        ]
        for worker in range(num_workers)
    ]
