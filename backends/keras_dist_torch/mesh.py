"""The device mesh over a cluster's workers, for FSDP and DTensor."""

import functools
import sys

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh

from keras_dist.plugins import replaced
from keras_dist_torch.fsdp_internals import GroupMember
from keras_dist_torch.workers import TorchWorkers


@functools.cache
def mesh_of(workers: TorchWorkers, device_type: str) -> DeviceMesh:
    """Makes a mesh with one device of each worker; all workers call it."""
    cluster = workers.cluster
    # A mesh is made from the default group. There must be none else: from
    # version 3.16, Keras puts models into DistributedDataParallel then.
    # PyTorch's hook for uncaught errors keeps what is printed until ours
    # returns, which ends the process if a worker is lost.
    no_group = replaced(GroupMember, WORLD=None)
    with no_group, replaced(sys, excepthook=sys.excepthook):
        dist.init_process_group(
            workers.group_name(),
            store=dist.PrefixStore("keras_dist/mesh", workers.store),
            rank=cluster.index,
            world_size=cluster.num_workers,
        )
        return init_device_mesh(device_type, (cluster.num_workers,))
