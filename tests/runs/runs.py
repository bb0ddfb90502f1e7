"""The runs: what each one starts, and which packages it can see."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile

from runs import alone

TESTS = pathlib.Path(__file__).parents[1]
BACKENDS = ("tensorflow", "jax", "torch")
# Folders whose tests are processes that they start, more than anything else.
PROGRAMS = ("clients", "docs", "launch", "tutorials", "workers")
# Folders whose tests train. One process with all tests grows to half of the
# memory that CI has.
TRAINING = ("backends", "nothing_lost", "parity", "sharded")
# Programs wait for each other: what computes goes on beside them.
LONGEST_FIRST = (
    "jax-training",
    "torch-programs",
    "tensorflow-training",
    "jax-programs",
    "tensorflow-programs",
    "tensorflow-others",
    "torch-training",
    "jax-others",
    "torch-others",
)
OLDEST_KERAS = "3.14.0"
# CI's runs see one framework, and leave out what another one runs.
# `full` sees all: one's data on another, and tf.distribute itself.
DIVIDED = {"TESTS_DIVIDED": "one"}
FULL = {"KERAS_DIST_ORIGINAL": "1"}
# What a package of each backend's extras would be used with.
PYTEST = ("-P", "-m", "pytest")
ALSO = {"jax": ("orbax-checkpoint",), "tensorflow": ("tensorboard",)}


@dataclasses.dataclass(frozen=True)
class Run:
    """One process of one framework.

    Args:
        name: String, the only one of its kind.
        backend: String, what KERAS_BACKEND is.
        command: Strings, what follows the name of Python.
        extras: Strings, what of keras-dist's extras can be imported, beside
            the backend's. `None` for all that is installed.
        keras: String, a version of Keras other than the one installed.
        variables: Pairs of strings, more variables of the process.
    """

    name: str
    backend: str
    command: tuple[str, ...]
    extras: tuple[str, ...] | None = ("test",)
    keras: str | None = None
    variables: tuple[tuple[str, str], ...] = ()

    def environment(self, folder):
        """Variables of the process; what they need is put into a folder."""
        paths = [os.environ.get("PYTHONPATH", "")]
        if self.keras:
            paths.insert(0, _installed(f"keras=={self.keras}", folder))
        if self.command[:3] != PYTEST:
            # The tests' own modules see to it in the tests' own process.
            paths.append(str(TESTS / "lean"))
        number = [run.name for run in RUNS].index(self.name)
        return {
            **os.environ,
            # Programs that many tests or workers compile are compiled once.
            "JAX_COMPILATION_CACHE_DIR": os.path.join(folder, "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            **dict(self.variables),
            "KERAS_BACKEND": self.backend,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TESTS_PORTS": f"{number}/{len(RUNS)}",
            "TESTS_WITHOUT": self._hidden(),
        }

    def _hidden(self):
        if self.extras is None or not os.environ.get("TESTS_DIVIDED"):
            return ""
        also = ("pip", *ALSO.get(self.backend, ()))
        return alone.hidden(self.backend, *self.extras, also=also)


def _installed(requirement, folder):
    """The path of a folder that has one distribution in another version."""
    target = tempfile.mkdtemp(dir=folder)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet"),
            *("--no-compile", "--no-deps", "--target", target, requirement),
        ],
        check=True,
    )
    return target


def _pytest(*arguments):
    return (*PYTEST, "-q", "-p", "no:cacheprovider", *arguments)


def _without_others(backend, paths):
    """Those of a backend or of all: the others' import their frameworks."""
    other = {TESTS / "backends" / each for each in BACKENDS if each != backend}
    return [str(path) for path in paths if other.isdisjoint(path.parents)]


def _runs():
    """Yields the runs, the longest first."""
    programs = [str(TESTS / folder) for folder in PROGRAMS]
    training = [str(TESTS / folder) for folder in TRAINING]
    # The compilers of accelerators have an environment of their own.
    other = [*programs, *training, TESTS / "compiled", TESTS / "cross"]
    others = [f"--ignore={path}" for path in other]
    # Looking into the other files takes as long as these tests.
    smoke = [
        path
        for path in sorted(TESTS.rglob("test_*.py"))
        if "mark.smoke" in path.read_text()
    ]
    groups = {
        "programs": programs,
        "training": training,
        "others": [*others, str(TESTS)],
    }
    for name in LONGEST_FIRST:
        backend, _, group = name.partition("-")
        yield Run(name, backend, _pytest(*groups[group]))
    yield Run("cross", "jax", _pytest(str(TESTS / "cross")), extras=None)
    # The contract holds for a backend written with stable names only.
    yield Run(
        "torch-fourth",
        "torch",
        _pytest(str(TESTS / "conformance")),
        variables=(("KERAS_DIST_FOURTH", "1"),),
    )
    for backend in BACKENDS:
        yield Run(
            f"{backend}-oldest-keras",
            backend,
            _pytest("-m", "smoke", *_without_others(backend, smoke)),
            keras=OLDEST_KERAS,
        )
    for backend in BACKENDS:
        demo = ("-P", "-m", "keras_dist.cli", "demo", "--backend", backend)
        yield Run(f"{backend}-demo", backend, demo, extras=("demo",))


RUNS = tuple(_runs())
