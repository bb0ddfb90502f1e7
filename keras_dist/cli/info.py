"""The report of `keras-dist info`."""

import os
import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.text import Text

from keras_dist.cli.child import Child
from keras_dist.cli.child import ChildError
from keras_dist.cli.variables import Masks
from keras_dist.cli.variables import cluster_variables
from keras_dist.cli.variables import other_variables
from keras_dist.environment.machine import num_cores
from keras_dist.environment.packages import BACKEND_VARIABLE
from keras_dist.environment.packages import InstalledBackend
from keras_dist.environment.packages import backends
from keras_dist.environment.packages import picked_by_keras
from keras_dist.environment.packages import related
from keras_dist.environment.packages import version_of
from keras_dist.environment.versions import support_of
from keras_dist.planning import tables

_VIRTUAL = "KERAS_DIST_VIRTUAL_DEVICES"


def gather(timeout: float) -> dict[str, Any]:
    """Returns the whole report, in types that JSON has."""
    known = backends()
    with ThreadPoolExecutor(max(1, len(known))) as threads:
        seen = list(threads.map(lambda backend: look(backend, timeout), known))
    masks = Masks(os.environ)
    name, why = picked_by_keras()
    by_name = {state["name"]: state for state in seen}
    first = next((e["name"] for e in seen if e["version"]), None)
    keras = version_of("keras")
    return {
        "keras_dist": version("keras-dist"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_cores": num_cores(),
        "keras": keras,
        "keras_support": support_of("keras", keras),
        "numpy": version("numpy"),
        # JAX's compiler for TPUs has a name of its own.
        "packages": related([*(backend.name for backend in known), "libtpu"]),
        "picked": {
            "backend": name,
            "reason": why,
            "problem": problem_of(name, by_name),
            "commands_take": os.environ.get(BACKEND_VARIABLE) or first,
        },
        "backends": [
            {key: value for key, value in state.items() if key != "cluster"}
            for state in seen
        ],
        "coordinators": {
            entry_point.name: entry_point.value
            for entry_point in entry_points(group="keras_dist.coordinators")
        },
        "virtual_devices": os.environ.get(_VIRTUAL) or None,
        "cluster": _cluster(seen, masks),
        "variables": other_variables(),
    }


def look(backend: InstalledBackend, timeout: float) -> dict[str, Any]:
    """Returns the state of a backend, and its devices if it starts in time."""
    state: dict[str, Any] = {
        "name": backend.name,
        "plugin": backend.plugin,
        "version": backend.version,
        "support": support_of(backend.name, backend.version)
        if backend.is_installed
        else None,
        "works": False,
        "problem": "",
        "fix": "",
        "devices": [],
    }
    if not backend.is_installed:
        return state | {"problem": "not installed", "fix": backend.fix}
    try:
        with Child(backend.name) as child:
            seen = child.answer(timeout)
    except ChildError as error:
        return state | {
            "problem": f"can't be used, {error.summary}",
            "last_lines": error.lines,
            "fix": backend.repair,
        }
    return state | {
        "works": True,
        "devices": seen["devices"],
        "shards_optimizer": seen["shards_optimizer"],
        "shards_variables": seen["shards_variables"],
        "cluster": seen["cluster"],
    }


def problem_of(name: str | None, by_name: Mapping[str, Any]) -> str:
    """Returns why `import keras` fails with a backend, and a fix; or ""."""
    if name is None or (name in by_name and by_name[name]["works"]):
        return ""
    if name not in by_name:
        return (
            f"keras_dist has no backend '{name}'. Set KERAS_BACKEND to one of "
            f"{', '.join(by_name)}."
        )
    state = by_name[name]
    others = [
        other for other, other_state in by_name.items() if other_state["works"]
    ]
    choice = f", or KERAS_BACKEND={others[0]}" if others else ""
    return f"{name}: {state['problem']}. Try: {state['fix']}{choice}"


def _cluster(seen: list[dict[str, Any]], masks: Masks) -> dict[str, Any]:
    cluster = next(
        (state["cluster"] for state in seen if "cluster" in state), None
    )
    if cluster is None:
        cluster = {"error": "only a working backend can tell"}
    return {"variables": cluster_variables()} | {
        key: masks(value) if isinstance(value, str) else value
        for key, value in cluster.items()
    }


def show_problem(console: Console, problem: str) -> None:
    if problem:
        console.print(Text(f"Problem: {problem}", style="bold red"))


def show(console: Console, report: dict[str, Any]) -> None:
    picked = report["picked"]
    pairs = {
        "keras_dist": report["keras_dist"],
        "Keras": f"{_supported(report['keras'], report['keras_support'])}, "
        f"NumPy {report['numpy']}",
        "Python": report["python"],
        "Platform": f"{report['platform']}, {report['cpu_cores']} CPU cores",
        "Keras takes": f"{picked['backend'] or '?'} ({picked['reason']})",
        "Commands take": picked["commands_take"] or "nothing",
        "Virtual devices": report["virtual_devices"]
        or f"{_VIRTUAL} is not set",
    }
    console.print(tables.pairs_table(pairs))
    show_problem(console, picked["problem"])
    console.print()
    _show_backends(console, report["backends"])
    console.print()
    _show_cluster(console, report["cluster"])
    _titled(console, "Packages", report["packages"])
    _titled(console, "Environment variables", report["variables"])


def _supported(shown: str, support: str | None) -> str:
    """Returns a version, with what is known about it."""
    return f"{shown} ({support})" if support else shown


def _show_backends(console: Console, states: list[dict[str, Any]]) -> None:
    heads = ("Name", "Version", "Devices", "Plugin")
    made = tables.table("Backends", *((head, tables.WORDS) for head in heads))
    for state in states:
        names = (
            tables.names_text(state["devices"]) if state["works"] else "none"
        )
        shown = _supported(state["version"] or "none", state["support"])
        made.add_row(state["name"], shown, names, state["plugin"])
    console.print(made)
    for state in states:
        if state["problem"]:
            console.print(
                Text(
                    f"{state['name']}: {state['problem']}. Try: {state['fix']}"
                )
            )
    works = [state for state in states if state["works"]]
    devices = [device for state in works for device in state["devices"]]
    if works and all(device.startswith("cpu:") for device in devices):
        console.print("No backend sees an accelerator.")


def _show_cluster(console: Console, cluster: dict[str, Any]) -> None:
    reason = cluster.get("reason") or cluster.get("error", "unknown")
    console.print(Text(f"Cluster: {reason}"))
    if cluster["variables"]:
        console.print(tables.pairs_table(cluster["variables"]))
    console.print()


def _titled(console: Console, title: str, pairs: dict[str, str]) -> None:
    if pairs:
        console.print(Text(title, style="italic"))
        console.print(tables.pairs_table(pairs))
        console.print()
