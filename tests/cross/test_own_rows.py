"""Workers load their own rows of one framework's data on another backend.

Elsewhere each backend is tested without the other frameworks.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from cross.test_cross import pytestmark  # noqa: F401
from parity.harness import BACKENDS

TESTS = pathlib.Path(__file__).parents[1]
OF_WORKERS = TESTS / "workers" / "test_own_rows.py"
SKIPPED = "TESTS_DIVIDED", "TESTS_WITHOUT"


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_loaded_and_numbers(backend):
    environment = {k: v for k, v in os.environ.items() if k not in SKIPPED}
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "pytest", "-q"),
            *("-p", "no:cacheprovider", str(OF_WORKERS)),
            *("-k", "numbers or tf_data or whole or order"),
        ],
        cwd=TESTS,
        env=environment | {"KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
