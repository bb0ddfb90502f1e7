"""How often workers meet for a `fit` and for an epoch, outside of steps."""

import pytest

import keras_dist
from workers import epoch_jobs


@pytest.fixture(scope="module")
def found():
    return keras_dist.launch(
        epoch_jobs.everything, workers=2, devices=1, timeout=400
    )


def test_exchanges_of_a_fit_and_of_an_epoch(found):
    # For the call with its data and random states, for the variables, and at
    # the end of each epoch.
    for counts, _ in found:
        assert counts[1] == {"numbers": 2 + 1, "values": 0}
        assert counts[3] == {"numbers": 2 + 3, "values": 0}
        assert counts["validation"] == counts[3]
        assert counts["evaluate"] == {"numbers": 2, "values": 0}


def test_a_callback_of_any_worker_may_decide_at_the_beginning(found):
    for counts, _ in found:
        # At both ends of an epoch, and at the end of `fit`.
        assert counts["callback"] == {"numbers": 2 + 2 * 3 + 1, "values": 0}


def test_values_that_differ_become_the_chiefs(found):
    (counts, weights), (_, others) = found
    assert counts["other values"] == {"numbers": 2 + 1, "values": 1}
    assert weights == others
