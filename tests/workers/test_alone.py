"""A script of `keras-dist run` whose workers would train alone is an error."""

import pytest

from workers import alone_script
from workers.faults import run_script


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("made outside of the scope", "StrategyMismatchError: `fit` of model"),
        ("a loop of one worker", "without having joined the other workers"),
    ],
)
def test_it_ends_with_an_error(mistake, told):
    done = run_script(alone_script.__file__, mistake)
    assert done.returncode == 1, done.stderr[-4000:]
    assert told in done.stderr
    assert "MultiWorkerMirroredStrategy" in done.stderr
    assert ("done" in done.stdout) == (mistake == "a loop of one worker")
