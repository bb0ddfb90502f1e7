"""Keras' tests in a strategy's scope, compared with plain Keras."""

import dataclasses

from clients.known import read_known
from clients.processes import outcomes
from clients.strategies import PLAIN

FAILED = ("failed", "not collected")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What came of Keras' tests in the scope of one strategy.

    Args:
        backend: String.
        strategy: String.
        passed: Tuple of tests that pass in the scope.
        skipped: Tuple of tests that Keras leaves out on this backend.
        fails_plain: Tuple of tests that fail in plain Keras too.
        known: Tuple of tests that fail in the scope, with a reason in the
            list.
        unknown: Dict from each other test that passes in plain Keras and
            fails in the scope, to the line that it fails with.
        passes_again: Tuple of what the list should not have any more: tests
            that pass in the scope.
    """

    backend: str
    strategy: str
    passed: tuple[str, ...]
    skipped: tuple[str, ...]
    fails_plain: tuple[str, ...]
    known: tuple[str, ...]
    unknown: dict[str, str]
    passes_again: tuple[str, ...]

    @property
    def is_good(self):
        """Whether the list of known failures says how it is."""
        return bool(self.passed) and not self.unknown and not self.passes_again


def compare(tests, backend, strategy, says=lambda text: None, folder=None):
    """Runs Keras' tests in a scope, and what fails there in plain Keras.

    Args:
        tests: As for `processes.outcomes`.
        backend: String, the value of `KERAS_BACKEND`.
        strategy: String, one of `STRATEGIES[backend]`.
        says: Callable that is told, in a string, what is going on.
        folder: Path of the tests; Keras' own by default.

    Returns:
        A `Comparison`.
    """
    found = outcomes(tests, backend, strategy, says, folder)
    failed = {t: error for t, (kind, error) in found.items() if kind in FAILED}
    plain = {}
    if failed:
        plain = outcomes(list(failed), backend, PLAIN, says, folder)
    entries = [e for e in read_known() if e.is_of(backend, strategy)]

    def is_known(test):
        return any(entry.explains(test, failed[test]) for entry in entries)

    def those(kind):
        return tuple(t for t, (outcome, _) in found.items() if outcome == kind)

    differ = [t for t in failed if plain.get(t, ("",))[0] == "passed"]
    return Comparison(
        backend=backend,
        strategy=strategy,
        passed=those("passed"),
        skipped=those("skipped"),
        fails_plain=tuple(t for t in failed if t not in differ),
        known=tuple(t for t in differ if is_known(t)),
        unknown={t: failed[t] for t in differ if not is_known(t)},
        passes_again=tuple(
            test
            for entry in entries
            for test in entry.passes_again(those("passed"), failed)
        ),
    )
