"""The axes of variables that the logical devices of a replica divide."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.plugins import Axes
from keras_dist.plugins import VariableLayouts

# The attribute of a variable with its axes.
_AXES = "_keras_dist_axes"


class LogicalAxes:
    """Looks up the axes of variables; a slot has those of its variable."""

    def __init__(self, layouts: VariableLayouts | None) -> None:
        self._layouts = layouts
        # The patterns that have named a variable.
        self._used: set[str] = set()

    def of(self, variable: keras.Variable) -> Axes:
        """Returns a variable's axes; `()` if each device has it whole."""
        layouts, shape = self._layouts, variable.shape
        if layouts is None or variable.synchronization == "on_read":
            return ()
        attributes: dict[str, Any] = vars(variable)
        if _AXES not in attributes:
            if shape is None or None in shape:
                return ()
            attributes[_AXES] = layouts.axes_of(variable.path, shape)
            self._used.update(layouts.matching(variable.path))
        axes: Axes = attributes[_AXES]
        return axes

    def keep_together(
        self, variable: keras.Variable, reference: keras.Variable
    ) -> None:
        """Gives a slot the axes of the variable that it was made for."""
        is_alike = variable.shape == reference.shape
        vars(variable)[_AXES] = self.of(reference) if is_alike else ()

    def match(
        self,
        variables: Sequence[keras.Variable],
        trained: Sequence[keras.Variable],
    ) -> None:
        """Gives an optimizer's variables axes, by the names in their paths."""
        for variable in variables:
            if vars(variable).get(_AXES):
                continue
            named = [
                reference
                for reference in trained
                if reference.path.replace("/", "_") in variable.path
            ]
            if named:
                # Another's path may end like this one's.
                longest = max(named, key=lambda reference: len(reference.path))
                self.keep_together(variable, longest)

    def check_used(self) -> None:
        """Raises `ValueError` for a pattern that has named no variable."""
        if self._layouts is not None:
            self._layouts.check_used(self._used)
