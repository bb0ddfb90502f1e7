"""The original behind the same door: what `api` is with `native`."""

from tensorflow import distribute
from tensorflow import train
from tensorflow.python.distribute.cluster_resolver import slurm_cluster_resolver

ClusterSpec = train.ClusterSpec
expand_hostlist = slurm_cluster_resolver.expand_hostlist
expand_tasks_per_node = slurm_cluster_resolver.expand_tasks_per_node


def __getattr__(name):
    return getattr(distribute.cluster_resolver, name)
