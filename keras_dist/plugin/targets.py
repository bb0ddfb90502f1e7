"""Names for backends that compile for machines that are not here."""

from keras_dist.planning.programs import Collective
from keras_dist.planning.programs import CompiledProgram
from keras_dist.planning.targets import Target

__all__ = ["Collective", "CompiledProgram", "Target"]
