"""Which installed distributions a run of the tests must not see."""

import importlib.metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Distributions that may be installed in place of another one.
SAME = {"keras": "keras-nightly"}


def hidden(*extras, also=()):
    """Names to hide, for an environment with `keras-dist[extras]` alone.

    Args:
        *extras: Strings, extras of keras-dist.
        also: Names of distributions that may be seen too.

    Returns:
        String for the environment variable TESTS_WITHOUT.
    """
    seen = {}
    _add("keras-dist", set(extras), seen)
    for name in also:
        _add(name, set(), seen)
    modules, kept = set(), set()
    for module, names in importlib.metadata.packages_distributions().items():
        owners = {canonicalize_name(name) for name in names}
        (kept if owners & seen.keys() else modules).add(module)
    distributions = {
        canonicalize_name(each.name)
        for each in importlib.metadata.distributions()
    }
    return ",".join(sorted((distributions - seen.keys()) | modules - kept))


def _add(name, extras, seen):
    """Adds a distribution and what it requires to what is seen."""
    name = canonicalize_name(name)
    if name in seen and extras <= seen[name]:
        return
    seen[name] = seen.get(name, set()) | extras
    if name in SAME:
        _add(SAME[name], extras, seen)
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for line in lines:
        needed = Requirement(line)
        for extra in extras | {""}:
            if not needed.marker or needed.marker.evaluate({"extra": extra}):
                _add(needed.name, set(needed.extras), seen)
