"""The versions that keras_dist is tested with, and those that are here."""

import enum
import os
import warnings
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from keras_dist.errors import UnsupportedBackendError
from keras_dist.errors import UnsupportedKerasError

ALLOW_VARIABLE = "KERAS_DIST_ALLOW_UNTESTED"
_NAMES = {
    "jax": "JAX",
    "keras": "Keras",
    "tensorflow": "TensorFlow",
    "torch": "PyTorch",
}


class Support(enum.StrEnum):
    """The result of comparing a version with those that are tested."""

    TESTED = "tested"
    UNTESTED = "untested"
    TOO_OLD = "too old"


@cache
def tested_versions() -> dict[str, SpecifierSet]:
    """Returns the versions of other packages that keras_dist asks pip for."""
    try:
        lines = requires("keras-dist") or []
    except PackageNotFoundError:
        # Its files lie on the path, and pip was never asked for anything.
        return {}
    specifiers: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, lines):
        known = specifiers.get(requirement.name, SpecifierSet())
        specifiers[requirement.name] = known & requirement.specifier
    return specifiers


def support_of(package: str, version: str) -> Support | None:
    """Returns what is known about a version; `None` for an unknown package."""
    expected = tested_versions().get(package)
    if not expected:
        return None
    if expected.contains(version, prereleases=True):
        return Support.TESTED
    oldest = [specifier for specifier in expected if specifier.operator == ">="]
    if all(
        specifier.contains(version, prereleases=True) for specifier in oldest
    ):
        return Support.UNTESTED
    return Support.TOO_OLD


def expectation(package: str) -> str:
    """Returns which versions are expected, and the command to get them."""
    expected = tested_versions().get(package)
    if not expected:
        return f"Expected: a version that has it. Install another {package}."
    # The oldest first; several extras may ask for the same.
    ordered = sorted({str(specifier) for specifier in expected}, reverse=True)
    text = f"{package}{','.join(ordered)}"
    return f"Expected: {text}. Do this: `pip install '{text}'`."


def unsupported(package: str) -> type[ImportError]:
    """Returns the class of errors about versions of a package."""
    return (
        UnsupportedKerasError if package == "keras" else UnsupportedBackendError
    )


def check(installed: Mapping[str, str]) -> None:
    """Refuses versions that are too old, and warns once of untested ones.

    Args:
        installed: Mapping from names of packages to their versions.

    Raises:
        UnsupportedKerasError: If Keras is too old.
        UnsupportedBackendError: If another package is too old.
    """
    untested = []
    for package, version in installed.items():
        support = support_of(package, version)
        if support is Support.TOO_OLD:
            raise unsupported(package)(
                f"keras_dist needs a newer {_NAMES.get(package, package)}. "
                f"Received: {package} {version}. {expectation(package)}"
            )
        if support is Support.UNTESTED:
            untested.append(f"{package} {version}. {expectation(package)}")
    if untested and os.environ.get(ALLOW_VARIABLE, "0") in ("", "0"):
        warnings.warn(
            "keras_dist is not tested with these versions. Received: "
            f"{' Received: '.join(untested)} Or set {ALLOW_VARIABLE}=1 to "
            "silence this warning.",
            stacklevel=2,
        )
