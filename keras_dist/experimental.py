"""The names of `tf.distribute.experimental`."""

from keras_dist.failure_handling import PreemptionCheckpointHandler
from keras_dist.failure_handling import TerminationConfig
from keras_dist.inputs.communication import CollectiveCommunication
from keras_dist.inputs.communication import CollectiveHints
from keras_dist.inputs.communication import CommunicationImplementation
from keras_dist.inputs.communication import CommunicationOptions
from keras_dist.inputs.options import ValueContext
from keras_dist.strategies.central_storage import CentralStorageStrategy
from keras_dist.strategies.multi_worker_mirrored import (
    experimental_multi_worker_mirrored as MultiWorkerMirroredStrategy,
)

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "PreemptionCheckpointHandler",
    "TerminationConfig",
    "ValueContext",
]
