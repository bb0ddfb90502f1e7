"""Runs `python -m bench` in its own process, and reads the numbers."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np

from gpu import places

TESTS = pathlib.Path(__file__).parents[1]
MODELS = ("small",) if places.IS_REHEARSAL else ("small", "medium")
# Time on a GPU is dear. A block is one `fit`, and JAX copies the state to the
# host when it starts: 9 ms for the medium model, on an H200.
FEW = (
    ("--rounds", "5", "--block-ms", "20")
    if places.IS_REHEARSAL
    else ("--rounds", "7", "--block-ms", "800")
)
# So many times is a measurement made, if it was only noise before.
TRIES = 1 if places.IS_REHEARSAL else 2


def measured(folder, *arguments):
    """Returns the settings of a benchmark's JSON, one for each model.

    Args:
        folder: `pathlib.Path` for the JSON.
        *arguments: Strings, the command and what only it takes, such as
            `"fit", "--replicas", "2"`.
    """
    path = folder / "bench.json"
    names = places.FOR_NUMBERS_ONLY
    environment = {k: v for k, v in os.environ.items() if k not in names}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bench"),
            *(*arguments, "--device", places.KIND),
            *("--backend", keras.backend.backend(), "--json", str(path)),
            *("--models", ",".join(MODELS), *FEW),
        ],
        cwd=TESTS,
        env=environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=1500,
    )
    assert not done.returncode, done.stdout + done.stderr
    return json.loads(path.read_text())["settings"]


def note(facts, setting, base):
    """Notes a setting's ratios, times and counts for the report."""
    title = f"{setting['model']}, N={len(setting['devices'])}"
    for row in setting["comparisons"]:
        facts.measured(
            f"time of {row['name']}, {title}", row["ratio"]["median"], "ratio"
        )
    facts.measured(f"A/A, {title}", setting["noise"]["median"], "ratio")
    for arm, times in setting["times"].items():
        facts.measured(
            f"a step of {arm}, {title}", float(np.median(times)), "s"
        )
    for arm in ("ours", base):
        calls = setting["counts"].get("calls", {}).get(arm)
        if calls is not None:
            facts.measured(f"Python calls of {arm}, {title}", calls, "calls")


def ratio(setting, name):
    """Returns the median of one comparison, such as `"ours/Keras"`."""
    (found,) = [
        row["ratio"]["median"]
        for row in setting["comparisons"]
        if row["name"] == name
    ]
    return found


def is_noise(setting):
    """Returns whether the machine was too busy to tell anything."""
    return any(row["verdict"] == "noise" for row in setting["comparisons"])
