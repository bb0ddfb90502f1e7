"""Names for backends that compile for machines that are not here."""

from keras_dist.planning.programs import Collective
from keras_dist.planning.programs import Program
from keras_dist.planning.targets import Target

__all__ = ["Collective", "Program", "Target"]
