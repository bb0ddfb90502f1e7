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
    """

    reason: str
    tests: tuple[str, ...]
    backends: tuple[str, ...] = tuple(STRATEGIES)
    strategies: tuple[str, ...] = STRATEGIES["jax"]

    def has(self, test, backend, strategy):
        """Whether a test is expected to fail."""
        return (
            backend in self.backends
            and strategy in self.strategies
            and any(fnmatch.fnmatchcase(test, each) for each in self.tests)
        )


def read_known(path=PATH):
    """The entries of the list.

    Args:
        path: `pathlib.Path` of a TOML file.
    """
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["known"]
    return [
        Known(**{k: v if k == "reason" else tuple(v) for k, v in e.items()})
        for e in entries
    ]
