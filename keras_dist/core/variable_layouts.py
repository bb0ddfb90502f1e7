"""The layouts of variables on the logical devices of a replica."""

import functools
import re
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# The axis of a replica's mesh that its logical devices are along.
LOGICAL = "logical"
# For each axis of a variable: `LOGICAL` if it is divided, else `None`.
Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class VariableLayouts:
    """The axes of variables that a replica's logical devices divide.

    Args:
        num_devices: Integer, the number of logical devices of a replica.
        patterns: Tuple of pairs of a regular expression, which has to match
            the whole path of a variable, and the layout's `Axes`.
    """

    num_devices: int
    patterns: tuple[tuple[str, Axes], ...] = ()

    def matching(self, path: str) -> list[str]:
        """Returns the patterns for a path; its exact name comes before all."""
        patterns = [pattern for pattern, _ in self.patterns]
        if path in patterns:
            return [path]
        return [
            pattern
            for pattern in patterns
            if _compiled(pattern).fullmatch(path)
        ]

    def axes_of(self, path: str, shape: Sequence[int]) -> Axes:
        """Returns a variable's axes; `()` if each device has it whole.

        Raises:
            ValueError: If two patterns contradict each other, or if the axes
                don't suit the shape.
        """
        layouts = dict(self.patterns)
        axes_by_pattern = {
            pattern: layouts[pattern] for pattern in self.matching(path)
        }
        if len(set(axes_by_pattern.values())) > 1:
            raise ValueError(
                f"Patterns of `layout_map` contradict each other about "
                f"variable '{path}'.\nReceived: {axes_by_pattern}. Expected: "
                "one layout for each variable. Make the patterns match other "
                "paths, or add the variable's whole path, which comes before "
                "patterns."
            )
        for pattern, axes in axes_by_pattern.items():
            self._check(pattern, axes, path, tuple(shape))
            return axes if LOGICAL in axes else ()
        return ()

    def _check(
        self, pattern: str, axes: Axes, path: str, shape: tuple[int, ...]
    ) -> None:
        received = (
            f"Received: {axes} of the pattern {pattern!r}, for variable "
            f"'{path}' of shape {shape}."
        )
        if len(axes) > len(shape):
            raise ValueError(
                "A layout has more axes than its variable. "
                f"{received} Expected: at most {len(shape)} axes. Change the "
                "layout, or make its pattern match other paths only."
            )
        for axis, (name, size) in enumerate(zip(axes, shape, strict=False)):
            if name is not None and size % self.num_devices:
                raise ValueError(
                    f"The {self.num_devices} logical devices of a replica "
                    "can't divide the axis of a variable into equal parts. "
                    f"{received} Expected: a size that is a multiple of "
                    f"{self.num_devices}; axis {axis} has {size}. Divide "
                    "another axis, change the layer's size, or leave the "
                    "variable out of `layout_map`."
                )

    def check_used(self, used: set[str]) -> None:
        """Raises `ValueError` for a pattern that names no variable."""
        unused = [
            pattern for pattern, _ in self.patterns if pattern not in used
        ]
        if unused:
            raise ValueError(
                "A pattern of `layout_map` names no variable of the "
                f"strategy.\nReceived: {unused}. Expected: regular expressions "
                "that match the whole `path` of a variable. Print "
                "`[v.path for v in model.variables]`, and correct or remove "
                "the pattern."
            )


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def parse_layouts(layout_map: object, num_devices: int) -> VariableLayouts:
    """Converts a user's `layout_map`; `None` divides no variable."""
    if layout_map is None:
        return VariableLayouts(num_devices)
    if not isinstance(layout_map, Mapping):
        raise TypeError(
            "`layout_map` must map patterns of paths to layouts. Received: "
            f"{layout_map!r} of type {type(layout_map).__name__}. Expected: a "
            "dict such as {r'.*up/kernel': (None, 'logical')}, or a "
            "`keras.distribution.LayoutMap`."
        )
    _check_mesh(getattr(layout_map, "device_mesh", None), num_devices)
    patterns = tuple(
        (_pattern(key), _axes(key, layout))
        for key, layout in layout_map.items()
    )
    return VariableLayouts(num_devices, patterns)


def _check_mesh(mesh: Any, num_devices: int) -> None:
    if mesh is None:
        return
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    if sizes.get(LOGICAL) != num_devices:
        raise ValueError(
            "The mesh of `layout_map` has to have the replicas' logical "
            f"devices along its axis '{LOGICAL}'.\nReceived: the axes {sizes}, "
            f"with logical_devices={num_devices}. Expected: '{LOGICAL}' of "
            f"size {num_devices}. Or pass a dict, which needs no mesh."
        )


def _pattern(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(
            "The keys of `layout_map` must be regular expressions. Received: "
            f"{key!r} of type {type(key).__name__}. Expected: a string."
        )
    try:
        _compiled(key)
    except re.error as error:
        raise ValueError(
            "A key of `layout_map` is no regular expression. Received: "
            f"{key!r}, {error}. Expected: a pattern such as '.*/kernel'."
        ) from error
    return key


def _axes(pattern: str, layout: object) -> Axes:
    axes = getattr(layout, "axes", layout)
    expected = (
        f"Expected: a tuple with '{LOGICAL}' for the axis to divide, and "
        f"`None` for each other axis, such as (None, '{LOGICAL}')."
    )
    if not isinstance(axes, (tuple, list)):
        raise TypeError(
            f"A layout of `layout_map` must be a tuple. Received: {layout!r} "
            f"of type {type(layout).__name__}, for {pattern!r}. {expected}"
        )
    unknown = [name for name in axes if name not in (LOGICAL, None)]
    if unknown or axes.count(LOGICAL) > 1:
        what = (
            f"{unknown[0]!r}, which no axis of a replica's mesh is called"
            if unknown
            else f"'{LOGICAL}' more than once"
        )
        raise ValueError(
            f"A layout of `layout_map` names {what}. Received: {layout!r} "
            f"for {pattern!r}. {expected}"
        )
    return tuple(axes)
