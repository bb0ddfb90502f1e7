"""The classes of all commands of `keras-dist`."""

import itertools
from collections.abc import Collection
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand
from typer.core import TyperGroup

# How help shows the value of an option that may be left out. Without a value,
# such an option means standard output.
OPTIONAL_FILE = "[FILE]"


class CliCommand(TyperCommand):
    """A command whose help shows no type for a flag, which takes no value."""

    def get_params(self, ctx: Any) -> Any:
        return without_types_of_flags(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        # Typer puts a list's name in braces, though this one has its own dots.
        return [
            piece.removeprefix("{").removesuffix("}...")
            if piece.endswith("...}...")
            else piece
            for piece in super().collect_usage_pieces(ctx)
        ]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = {
            name
            for parameter in self.params
            if parameter.metavar == OPTIONAL_FILE
            for name in parameter.opts
        }
        return super().parse_args(ctx, with_left_out_files(args, names))


class CliGroup(TyperGroup):
    """A group of commands, with the same help."""

    def get_params(self, ctx: Any) -> Any:
        return without_types_of_flags(super().get_params(ctx))


def without_types_of_flags(params: Any) -> Any:
    """Makes help show `--help`, and not `--help <bool>`; returns `params`."""
    for parameter in params:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return params


def with_left_out_files(
    args: Sequence[str], names: Collection[str]
) -> list[str]:
    """Returns arguments in which the options of these names have a value.

    Where the next argument is an option or there is none, the value is `-`.
    """
    made = []
    for arg, following in itertools.zip_longest(args, args[1:]):
        is_left_out = following is None or (
            following.startswith("-") and following != "-"
        )
        # One argument: if it is the value of another option, it stays one.
        made.append(f"{arg}=-" if arg in names and is_left_out else arg)
    return made
