"""Addresses where workers meet are read, looked up, and named if taken."""

import os
import socket
import sys

import pytest

from keras_dist.errors import ClusterError
from keras_dist.joining.addresses import listen
from keras_dist.joining.addresses import numeric
from keras_dist.joining.addresses import own_host
from keras_dist.joining.addresses import split


def _has_address(host):
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


has_ipv6 = pytest.mark.skipif(
    not _has_address("::1"), reason="No IPv6 on this machine."
)


@pytest.mark.parametrize(
    ("leader", "own"),
    [
        ("127.0.0.1:9000", "127.0.0.1"),
        pytest.param("[::1]:9000", "::1", marks=has_ipv6),
    ],
)
def test_a_worker_without_an_address_finds_its_own(leader, own):
    assert own_host("", leader) == own
    assert own_host(leader, "other:1") == own


def test_what_is_no_address_of_this_machine():
    for address in ("host", ":1", "host:", "host:one"):
        with pytest.raises(ClusterError, match="Expected: 'host:port'"):
            split(address)
    with pytest.raises(ClusterError, match=r"no\.such\.host\.invalid"):
        numeric("no.such.host.invalid:9000")
    with pytest.raises(ClusterError, match="can't be opened for listening"):
        listen("192.0.2.1:9000")


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("taken_everywhere", [False, True])
@pytest.mark.parametrize(
    "host", ["127.0.0.1", pytest.param("[::1]", marks=has_ipv6)]
)
def test_a_port_that_is_taken(host, everywhere, taken_everywhere):
    with listen(f"{host}:0", everywhere=taken_everywhere) as taken:
        address = f"{host}:{taken.getsockname()[1]}"
        with pytest.raises(ClusterError) as caught:
            listen(address, patience=0, everywhere=everywhere)
    assert f"'{address}' is in use" in str(caught.value)
    if sys.platform == "linux":
        assert f"process {os.getpid()} (" in str(caught.value)
        assert "pytest" in str(caught.value)
