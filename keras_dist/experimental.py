"""The names of `tf.distribute.experimental`."""

from keras_dist.core.options import CollectiveCommunication
from keras_dist.core.options import CollectiveHints
from keras_dist.core.options import CommunicationImplementation
from keras_dist.core.options import CommunicationOptions
from keras_dist.core.options import ValueContext
from keras_dist.strategies.central_storage import CentralStorageStrategy
from keras_dist.strategies.multi_worker_mirrored import (
    experimental_multi_worker_mirrored as MultiWorkerMirroredStrategy,
)
from keras_dist.strategies.tpu import experimental_tpu as TPUStrategy
from keras_dist.tools.preemption import PreemptionCheckpointHandler
from keras_dist.tools.preemption import TerminationConfig

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
]
