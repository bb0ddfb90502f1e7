"""Names that `tf.distribute` keeps under `experimental`."""

from keras_dist.inputs.communication import CollectiveCommunication
from keras_dist.inputs.communication import CollectiveHints
from keras_dist.inputs.communication import CommunicationImplementation
from keras_dist.inputs.communication import CommunicationOptions
from keras_dist.inputs.options import ValueContext

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "ValueContext",
]
