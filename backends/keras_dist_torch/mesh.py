"""The device mesh over a cluster's workers, for FSDP and DTensor."""

import contextlib
import functools
import sys
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh

from keras_dist_torch.fsdp_internals import GroupMember
from keras_dist_torch.workers import TorchWorkers


@functools.cache
def mesh_of(workers: TorchWorkers, device_type: str) -> DeviceMesh:
    """Makes a mesh with one device of each worker; all workers call it."""
    cluster = workers.cluster
    with _no_default_group(), _same_excepthook():
        dist.init_process_group(
            workers.group_name(),
            store=dist.PrefixStore("keras_dist/mesh", workers.store),
            rank=cluster.index,
            world_size=cluster.num_workers,
        )
        return init_device_mesh(device_type, (cluster.num_workers,))


@contextlib.contextmanager
def _no_default_group() -> Iterator[None]:
    """Takes the default group away inside, and puts it back at the end.

    A mesh is made from the default group. From version 3.16, Keras puts models
    into DistributedDataParallel wherever there is one.
    """
    before, GroupMember.WORLD = GroupMember.WORLD, None
    try:
        yield
    finally:
        GroupMember.WORLD = before


@contextlib.contextmanager
def _same_excepthook() -> Iterator[None]:
    """Puts the hook for uncaught errors back at the end.

    That of PyTorch keeps what is printed until ours returns, which ends the
    process if a worker is lost.
    """
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before
