"""Cluster resolvers: the workers' addresses, and this process' position.

```
resolver ──cluster_of──> Cluster ──> a strategy of several workers
```

`detect` finds the resolver that fits the environment variables of this process.
"""

# Keras first: `environment.keras_import` sets up what goes with it.
import keras  # noqa: F401

from keras_dist.cluster_resolver.base import ClusterResolver
from keras_dist.cluster_resolver.cloud import TPUClusterResolver
from keras_dist.cluster_resolver.detection import detect
from keras_dist.cluster_resolver.environment import TFConfigClusterResolver
from keras_dist.cluster_resolver.kubernetes import KubernetesClusterResolver
from keras_dist.cluster_resolver.kubernetes import KubernetesExecutableLocation
from keras_dist.cluster_resolver.launched import KerasDistClusterResolver
from keras_dist.cluster_resolver.launched import MPIClusterResolver
from keras_dist.cluster_resolver.launched import TorchrunClusterResolver
from keras_dist.cluster_resolver.ray_train import RayTrainClusterResolver
from keras_dist.cluster_resolver.simple import SimpleClusterResolver
from keras_dist.cluster_resolver.simple import UnionResolver
from keras_dist.cluster_resolver.slurm import SlurmClusterResolver
from keras_dist.cluster_resolver.slurm import expand_hostlist
from keras_dist.cluster_resolver.slurm import expand_tasks_per_node
from keras_dist.cluster_resolver.spec import ClusterSpec
from keras_dist.cluster_resolver.tasks import cluster_of

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "KerasDistClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "MPIClusterResolver",
    "RayTrainClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "TorchrunClusterResolver",
    "UnionResolver",
    "cluster_of",
    "detect",
    "expand_hostlist",
    "expand_tasks_per_node",
]
