"""The environment of processes that import keras_dist from a source tree.

Plugins are found by the entry points of an installed distribution. A source
tree is none, so this module writes the metadata that installing would write,
into a temporary folder, from `pyproject.toml`.
"""

import os
import pathlib
import re
import tomllib

TESTS = pathlib.Path(__file__).parents[1]
ROOT = TESTS.parent


def environment(folder):
    """Returns variables with which Python finds this source tree.

    Args:
        folder: `pathlib.Path` of an empty folder, for the metadata. It has to
            stay as long as processes with these variables run.

    Returns:
        Dict of all environment variables.
    """
    write_metadata(folder)
    paths = [folder, ROOT, ROOT / "backends", TESTS]
    inherited = os.environ.get("PYTHONPATH")
    found = [*map(str, paths), *([inherited] if inherited else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found)}


def write_metadata(folder):
    """Writes the metadata of keras-dist, with its entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version = project["name"], _version()
    target = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    target.mkdir()
    target.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines.append(f"[{group}]")
        lines += [f"{key} = {value}" for key, value in entries.items()]
    target.joinpath("entry_points.txt").write_text("\n".join(lines) + "\n")


def _version():
    text = (ROOT / "keras_dist" / "__init__.py").read_text()
    return re.search(r'^__version__ = "(.+)"', text, re.MULTILINE)[1]
