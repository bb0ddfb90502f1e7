"""Registered backends, and their installed packages."""

import functools
import json
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import distributions
from importlib.metadata import entry_points
from importlib.metadata import packages_distributions
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

BACKEND_VARIABLE = "KERAS_BACKEND"
_GROUP = "keras_dist.backends"


@dataclass(frozen=True)
class InstalledBackend:
    """A registered backend, whose framework may not be installed."""

    name: str  # also of the framework's module
    plugin: str
    is_installed: bool

    @functools.cached_property
    def version(self) -> str:
        """The framework's version: looking for it can take a second."""
        return version_of(self.name) if self.is_installed else ""

    @property
    def fix(self) -> str:
        """The command that installs the backend."""
        return f"pip install 'keras-dist[{self.name}]'"

    @property
    def repair(self) -> str:
        """The command that installs the backend again."""
        return f"pip install --force-reinstall 'keras-dist[{self.name}]'"


def backends() -> list[InstalledBackend]:
    """Returns all registered backends, sorted by name."""
    plugins = {
        entry_point.name: entry_point.value
        for entry_point in entry_points(group=_GROUP)
    }
    return [
        InstalledBackend(name, plugins[name], find_spec(name) is not None)
        for name in sorted(plugins)
    ]


@functools.cache  # it reads files
def version_of(module: str) -> str:
    """Returns the version of a module's distribution, or `"unknown"`."""
    try:
        return version(module)
    except PackageNotFoundError:
        names = packages_distributions().get(module, [])
        return version(names[0]) if names else "unknown"


def related(names: list[str]) -> dict[str, str]:
    """Returns versions of the packages whose names begin with these names."""
    versions = {
        str(distribution.metadata["Name"]): distribution.version
        for distribution in distributions()
    }
    return {
        name: versions[name]
        for name in sorted(versions, key=str.lower)
        if name.lower().startswith(tuple(names))
    }


def picked_by_keras() -> tuple[str | None, str]:
    """Returns the backend that `import keras` takes (or `None`), and why."""
    name = os.environ.get(BACKEND_VARIABLE)
    if name:
        return name, f"{BACKEND_VARIABLE}={name}"
    home = os.environ.get("KERAS_HOME") or Path.home() / ".keras"
    path = Path(home) / "keras.json"
    try:
        name = json.loads(path.read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        name = None
    if name:
        return str(name), f"{BACKEND_VARIABLE} is not set, {path.name} names it"
    return None, f"{BACKEND_VARIABLE} is not set: Keras takes its own default"
