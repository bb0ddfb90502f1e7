"""Each run of CI sees its own framework, and every test is in some run."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import time

import pytest
import without

from parity.harness import BACKEND
from parity.harness import BACKENDS
from runs import alone
from runs import runs
from runs.pool import run_all
from runs.pool import summary_of


def test_a_run_has_no_framework_but_its_own():
    """Where the runs share an environment, in their processes as well."""
    if not without.HIDDEN:
        pytest.skip("This process was not started by `python -m runs`.")
    others = [name for name in BACKENDS if name != BACKEND]
    script = (
        "import importlib.util, sys; "
        "print([n for n in sys.argv[1:] if importlib.util.find_spec(n)])"
    )
    told = subprocess.check_output([sys.executable, "-c", script, *others])
    assert told.decode().strip() == "[]"
    for name in others:
        assert name not in sys.modules
        assert importlib.util.find_spec(name) is None
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)


def test_what_is_hidden_is_neither_found_nor_imported():
    script = (
        "import importlib.metadata as m, importlib.util as u\n"
        "print([u.find_spec('rich'), u.find_spec('typer') is None])\n"
        "print([d.name for d in m.distributions() if d.name == 'rich'])\n"
        "import rich"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, without.VARIABLE: "rich"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[None, False]\n[]\n"
    assert "ModuleNotFoundError: No module named 'rich'" in done.stderr


def test_what_an_extra_requires_is_not_hidden():
    hidden = alone.hidden(BACKEND, "test").split(",")
    assert not {BACKEND, "keras", "keras_dist", "numpy", "pytest"} & {*hidden}
    hidden = alone.hidden(BACKEND).split(",")
    assert {"pytest", "_pytest", "matplotlib", "nbmake"} <= {*hidden}
    assert not {BACKEND, "keras", "numpy", "rich"} & {*hidden}
    assert "pytest" not in alone.hidden(also=["pytest"]).split(",")


def test_every_folder_is_in_one_run_of_each_backend():
    tests = {str(path) for path in runs.TESTS.glob("*/**/test_*.py")}
    # One environment of all backends has the first of these folders, and the
    # compilers' environment the second.
    others = {p for p in tests if "/cross/" in p or "/compiled/" in p}
    for backend in BACKENDS:
        found = [
            path
            for run in runs.RUNS
            if run.backend == backend
            and run.extras == ("test",)
            # The others are again.
            and not (run.keras or run.variables)
            for path in _files(run, tests)
        ]
        assert sorted([*found, *others]) == sorted(tests)


def _files(run, tests):
    """The files that a run's command names, by its folders."""
    left_out = tuple(
        word.removeprefix("--ignore=") + os.sep
        for word in run.command
        if word.startswith("--ignore=")
    )
    folders = tuple(word + os.sep for word in run.command if word[0] == "/")
    return [
        path
        for path in tests
        if path.startswith(folders) and not path.startswith(left_out)
    ]


class _Run:
    """A run of a line of Python."""

    def __init__(self, name, line):
        self.name = name
        self.command = ("-c", line)

    def environment(self, folder):
        return dict(os.environ)


def test_it_tells_how_each_run_ended(capfd):
    lines = {
        f"ends with {status}": f"print('a word'); raise SystemExit({status})"
        for status in (0, 3, 1)
    }
    ends = run_all([_Run(*each) for each in lines.items()], 2)
    assert [end.status for end in ends] == [0, 3, 1]
    assert {end.summary for end in ends} == {"a word"}
    assert "== ends with 3: status 3 after" in capfd.readouterr().out


def test_an_interrupt_ends_what_runs(tmp_path):
    began = tmp_path / "began"
    line = f"import time; open({str(began)!r}, 'w').close(); time.sleep(600)"

    class Interrupted(_Run):
        def environment(self, folder):
            while not began.exists():
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all([Interrupted("one", ""), _Run("slow", line)], 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("..\n2 passed in 0.10s\na library: bye", "2 passed in 0.10s"),
        ("1 failed, 2 passed in 9s", "1 failed, 2 passed in 9s"),
        ("=== 3 errors in 1.00s ===\nbye", "=== 3 errors in 1.00s ==="),
        ("train\nPASS the same weights", "PASS the same weights"),
        ("", ""),
    ],
)
def test_a_run_is_summed_up_by_its_counts(text, expected):
    assert summary_of(text) == expected
