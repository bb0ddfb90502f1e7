"""Every number has a test, or stands in the list of those that have none."""

import ast
import pathlib

import pytest

from conformance.contract import LEFT_OUT
from conformance.contract import NUMBERS
from conformance.contract import contract


def _carried():
    here = pathlib.Path(__file__)
    for path in here.parents[1].rglob("test_*.py"):
        if path == here:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", None) == "contract"
            ):
                yield from (argument.value for argument in node.args)


def test_every_number_is_carried_or_left_out():
    carried = set(_carried())
    assert [n for n in NUMBERS if n not in carried | LEFT_OUT.keys()] == []
    assert carried & LEFT_OUT.keys() == set()


def test_a_number_outside_of_the_contract_is_refused():
    with pytest.raises(ValueError, match="L-9"):
        contract(1, "L-9")
