"""The list of Keras' tests that are known to fail in a scope, with reasons."""

import dataclasses
import fnmatch
import pathlib
import tomllib

from clients.strategies import STRATEGIES

PATH = pathlib.Path(__file__).with_name("known.toml")


@dataclasses.dataclass(frozen=True)
class Known:
    """Tests that fail in a scope, all for the same reason.

    Args:
        reason: String, a sentence for users.
        tests: Tuple of patterns, relative to `keras/src`, with `*`.
        backends: Tuple of backends on which they all fail.
        strategies: Tuple of strategies in whose scope they all fail.
        error: String, a pattern of the line that they fail with, for patterns
            of which some tests pass. Some test has to fail so.
    """

    reason: str
    tests: tuple[str, ...]
    backends: tuple[str, ...] = tuple(STRATEGIES)
    strategies: tuple[str, ...] = STRATEGIES["jax"]
    error: str = ""

    def is_of(self, backend, strategy):
        """Whether its tests are expected to fail there."""
        return backend in self.backends and strategy in self.strategies

    def names(self, test):
        """Whether a test is one of its tests."""
        return any(fnmatch.fnmatchcase(test, each) for each in self.tests)

    def explains(self, test, error):
        """Whether a failure is expected."""
        is_so = not self.error or fnmatch.fnmatchcase(error, self.error)
        return is_so and self.names(test)

    def passes_again(self, passed, failed):
        """Its tests, or patterns, that don't fail any more.

        Args:
            passed: Collection of tests that pass.
            failed: Dict from tests that fail to the lines they fail with.
        """
        if not self.error:
            return list(filter(self.names, passed))
        if any(self.explains(*each) for each in failed.items()):
            return []
        return list(self.tests) if any(map(self.names, passed)) else []


def read_known(path=PATH):
    """The entries of the list.

    Args:
        path: `pathlib.Path` of a TOML file.
    """
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["known"]
    return [
        Known(
            **{
                name: tuple(value) if isinstance(value, list) else value
                for name, value in entry.items()
            }
        )
        for entry in entries
    ]
