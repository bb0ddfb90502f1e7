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
    # Dropout on several replicas has other masks than on one device.
    num_replicas = min(2, max(case.replicas))
    assert_same(train(case, num_replicas, central), plain(case), case.rtol)
