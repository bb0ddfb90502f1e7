"""Only a worker's own address answers for TensorFlow's server."""

import pathlib
import sys

import pytest

from workers.test_ports import on_two_hosts
from workers.test_ports import pytestmark  # noqa: F401

SCRIPT = pathlib.Path(__file__).with_name("filter_script.py")


@pytest.mark.parametrize(
    ("mode", "answers"), [("filtered", "its own"), ("open", "both")]
)
def test_only_the_workers_own_address_answers(mode, answers):
    script = (sys.executable, str(SCRIPT))
    _, shown = on_two_hosts(*script, "INDEX", "9000", mode)
    assert shown.split("\n")[-2:] == [answers, ""]
