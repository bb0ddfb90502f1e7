"""Backends and what is installed of them."""

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

from keras_dist_cli.environment import BACKEND_VARIABLE

_GROUP = "keras_dist.backends"


@dataclass(frozen=True)
class Backend:
    """A registered backend.

    Args:
        name: String, which Keras and the framework's module have too.
        plugin: String, the class that carries it out.
        version: String, of the framework; empty if it is not installed.
    """

    name: str
    plugin: str
    version: str

    @property
    def is_installed(self) -> bool:
        """Whether its framework can be found."""
        return bool(self.version)

    @property
    def fix(self) -> str:
        """How to install it."""
        return f"pip install 'keras-dist[{self.name}]'"

    @property
    def repair(self) -> str:
        """How to install it again."""
        return f"pip install --force-reinstall 'keras-dist[{self.name}]'"


def backends() -> list[Backend]:
    """All registered backends, by name."""
    found = {each.name: each.value for each in entry_points(group=_GROUP)}
    return [
        Backend(name, found[name], version_of(name) if find_spec(name) else "")
        for name in sorted(found)
    ]


def version_of(module: str) -> str:
    """The version of what has a module; `"unknown"` if nobody says."""
    try:
        return version(module)
    except PackageNotFoundError:
        names = packages_distributions().get(module, [])
        return version(names[0]) if names else "unknown"


def related(names: list[str]) -> dict[str, str]:
    """Versions of the packages whose names begin with one of these.

    They are what frameworks come in: `jaxlib`, plugins for accelerators.
    """
    found = {
        str(each.metadata["Name"]): each.version for each in distributions()
    }
    return {
        name: found[name]
        for name in sorted(found, key=str.lower)
        if name.lower().startswith(tuple(names))
    }


def picked_by_keras() -> tuple[str | None, str]:
    """Which backend `import keras` takes, and what says so.

    Returns:
        The name, or `None` where Keras takes its own default; and the words.
    """
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
        return str(name), f"{BACKEND_VARIABLE} is not set, {path.name} says it"
    return None, f"{BACKEND_VARIABLE} is not set: Keras takes its own default"
