"""Matches a model's variables with those that a checkpoint lists."""

import re
import urllib.parse
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.fit.workers.agreement import first_of

# Variables of each group of a model's state: "model", "optimizer" and so on.
Groups = dict[str, list[keras.Variable]]
# What a checkpoint says of a variable: its path, shape and dtype.
Described = dict[str, Any]
# Keras appends such numbers to names that were used before.
_NUMBER = re.compile(r"_\d+(?![0-9A-Za-z])")


def key(group: str, position: int) -> str:
    """Returns the name of a variable in the files."""
    # A group is named by a place, with keys of the user's dicts.
    return f"{urllib.parse.quote(group, safe='')}.{position}"


def described(variable: keras.Variable) -> Described:
    return {
        "path": variable.path,
        "shape": list(variable.shape),
        "dtype": variable.dtype,
    }


def matched(
    groups: Groups, saved: dict[str, list[Described]]
) -> dict[str, keras.Variable]:
    """Returns the variables by their names in the files.

    Raises `ValueError` if they are not those of the checkpoint.
    """
    named: dict[str, keras.Variable] = {}
    problems: list[str] = []
    for group in [*groups, *(group for group in saved if group not in groups)]:
        variables, theirs = groups.get(group, []), saved.get(group, [])
        positions = _positions(variables, theirs)
        taken = [position for position in positions if position is not None]
        problems += [
            f"'{entry['path']}' ({group}) is not in the model"
            for position, entry in enumerate(theirs)
            if position not in taken
        ]
        for variable, position in zip(variables, positions, strict=True):
            description = described(variable)
            if position is None:
                problems.append(
                    f"'{description['path']}' ({group}) is not in the "
                    "checkpoint"
                )
                continue
            named[key(group, position)] = variable
            if _kind(description) != _kind(theirs[position]):
                problems.append(
                    f"'{description['path']}' is {_kind(description)} in the "
                    f"model, and {_kind(theirs[position])} in the checkpoint"
                )
    if problems:
        raise ValueError(
            "The checkpoint has other variables than the model. Received: "
            f"{first_of(problems, '; ')}. Expected: "
            "the model and the optimizer that were saved."
        )
    return named


def _positions(
    variables: Sequence[keras.Variable], saved: Sequence[Described]
) -> list[int | None]:
    """Returns each variable's position in the checkpoint, or `None`."""
    paths = [variable.path for variable in variables]
    theirs = [description["path"] for description in saved]
    if set(paths) != set(theirs):  # Keras may have numbered them differently
        paths, theirs = _without_numbers(paths), _without_numbers(theirs)
    places: dict[str, list[int]] = {}
    for position, path in enumerate(theirs):
        places.setdefault(path, []).append(position)
    # Variables of one path are in the same order.
    return [places[p].pop(0) if places.get(p) else None for p in paths]


def _without_numbers(paths: Sequence[str]) -> list[str]:
    return [_NUMBER.sub("", path) for path in paths]


def _kind(saved: Described) -> str:
    return f"{saved['dtype']} of shape {tuple(saved['shape'])}"
