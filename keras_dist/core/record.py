"""Storage: notes on one variable, which are gone with it."""

from typing import Any
from typing import Self

import keras


class VariableRecord:
    """The front end's notes on one variable; a backend has a subclass.

    It is in an attribute of its variable, the only one of its class, and so is
    gone with it. It never refers to the variable, which would be a cycle.
    """

    attribute = "_keras_dist_storage"
    # The device of a single copy, once `Owners` has chosen it.
    owner: Any = None
    # Its number among those that all workers have got from the chief.
    number: int | None = None

    @classmethod
    def of(cls, variable: keras.Variable) -> Self:
        """Returns a variable's object of this class, made when first used."""
        attributes: dict[str, Any] = vars(variable)
        if cls.attribute not in attributes:
            attributes[cls.attribute] = cls()
        record: Self = attributes[cls.attribute]
        return record
