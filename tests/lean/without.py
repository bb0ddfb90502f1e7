"""Installed distributions that a process acts as if it didn't have.

One environment has all three frameworks, and each run of the tests sees one.
TESTS_WITHOUT has the names of the distributions and of the modules that are
hidden, with commas between them; `runs.alone` makes it. They are hidden once
this module is imported.
"""

import importlib.machinery
import os
import sys

VARIABLE = "TESTS_WITHOUT"
HIDDEN = frozenset(filter(None, os.environ.get(VARIABLE, "").split(",")))


class Without(importlib.machinery.PathFinder):
    """Finds what is on the path, but for what is hidden."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in HIDDEN:
            return None
        return super().find_spec(fullname, path, target)

    @classmethod
    def find_distributions(cls, *args, **kwargs):
        for found in super().find_distributions(*args, **kwargs):
            # Reading a distribution's metadata for its name takes 3 ms.
            if canonical(found._normalized_name) not in HIDDEN:
                yield found


def canonical(name):
    """A distribution's name as requirements are compared by."""
    return (name or "").lower().replace("_", "-").replace(".", "-")


if HIDDEN:
    sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Without
