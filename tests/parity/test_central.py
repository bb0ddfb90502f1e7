"""`fit` gives one device's numbers where variables are on a device apart."""

import pytest

from parity import cases
from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import central
from parity.harness import plain
from parity.harness import train

CASES = [case for case in cases.CASES if BACKEND in case.backends]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_same_numbers(case):
    assert_same(train(case, 2, central), plain(case), case.rtol)
