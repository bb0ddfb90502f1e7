"""Where look-ups fail, the server's filter takes no worker to be here."""

import ipaddress

import pytest

from keras_dist.core.plan import Cluster
from keras_dist.errors import ClusterError
from keras_dist_tensorflow import cluster as addresses

ADDRESSES = ("here:9000", "there:9000")
LOOPBACK = ipaddress.ip_address("127.0.0.1")


@pytest.fixture
def narrowed(monkeypatch):
    """Attaches filters with these answers of look-ups; says if it did."""

    def attach(answers):
        calls = []
        monkeypatch.setattr(
            addresses, "ip_addresses", lambda host: answers.get(host, [])
        )
        monkeypatch.setattr(
            addresses, "_narrow", lambda *given: calls.append(given)
        )
        cluster = Cluster(0, ADDRESSES[0], ADDRESSES)
        addresses.listen_to_own_address(cluster)
        return bool(calls)

    return attach


def test_a_host_that_can_not_be_looked_up_is_an_error(narrowed):
    with pytest.raises(ClusterError, match="Received: 'here:9000'"):
        narrowed({})


def test_a_worker_whose_look_up_fails_is_not_taken_to_be_here(narrowed):
    assert not narrowed({"here": [LOOPBACK]})
    assert narrowed({"here": [LOOPBACK], "there": [LOOPBACK]})
