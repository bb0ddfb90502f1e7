"""A program that used strategies leaves Keras as it was found."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from nothing_lost import leaving

TESTS = Path(__file__).parents[1]


@functools.cache
def _report():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", leaving.__name__],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.runs_on("torch")  # the compilers take minutes
@pytest.mark.parametrize("program", leaving.PROGRAMS)
def test_nothing_stays_replaced(program):
    assert _report()[program] == []


def test_a_plain_model_beside_it_gets_its_own_numbers():
    for job, differs in _report()["neighbours"].items():
        assert not any(differs), job


def test_all_that_is_replaced_stands_in_a_table():
    assert _report()["outside of the tables"] == []
