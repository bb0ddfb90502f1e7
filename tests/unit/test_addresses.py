"""The host of a worker whose address its launcher does not tell."""

import socket

import pytest

from keras_dist.core.addresses import own_host
from keras_dist.core.plan import Cluster


def _has_address(host):
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("leader", "own"),
    [
        ("127.0.0.1:9000", "127.0.0.1"),
        pytest.param(
            "[::1]:9000",
            "::1",
            marks=pytest.mark.skipif(
                not _has_address("::1"), reason="No IPv6 on this machine."
            ),
        ),
    ],
)
def test_a_worker_without_an_address_finds_its_own(leader, own):
    cluster = Cluster(1, leader, (leader, ""))
    assert own_host(cluster) == own
