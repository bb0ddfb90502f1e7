"""The classes of all commands of `keras-dist`."""

from typing import Any

from typer.core import TyperCommand
from typer.core import TyperGroup


class Command(TyperCommand):
    """A command whose help shows no type for a flag, which takes no value."""

    def get_params(self, ctx: Any) -> Any:
        return without_types_of_flags(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands, with the same help."""

    def get_params(self, ctx: Any) -> Any:
        return without_types_of_flags(super().get_params(ctx))


def without_types_of_flags(params: Any) -> Any:
    """Makes help show `--help`, and not `--help <bool>`; returns `params`."""
    for each in params:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return params
