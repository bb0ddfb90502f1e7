"""Addresses of workers: whether they can be used."""

import errno
import ipaddress
import socket
import time

from keras_dist.core.cluster import Cluster
from keras_dist.errors import ClusterError

# Seconds that other workers' names may take to be known: some schedulers
# announce a host when it starts.
NAMING = 60.0

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def check_addresses(cluster: Cluster, seconds: float) -> None:
    """Refuses names that nobody knows, and an own port that is in use.

    Args:
        cluster: The `Cluster`.
        seconds: Float, how long other workers' names may take to be known, up
            to a minute.

    Raises:
        ClusterError: If there is one.
    """
    deadline = time.monotonic() + min(seconds, NAMING)
    for index, address in enumerate(cluster.addresses):
        host, _ = split(address)
        while not ip_addresses(host):
            if index == cluster.index or time.monotonic() > deadline:
                raise ClusterError(
                    f"The host of worker {index} is unknown. Received: "
                    f"'{address}'. Expected: \"host:port\" with a name or an "
                    "IP address that this machine can look up."
                )
            time.sleep(0.5)  # between two look-ups
    _check_port(cluster.index, cluster.addresses[cluster.index])


def split(address: str) -> tuple[str, int]:
    """The host and the port of `"host:port"`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def ip_addresses(host: str) -> list[IPAddress]:
    """What a name stands for; nothing if nobody knows it."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [ipaddress.ip_address(str(entry[4][0])) for entry in found]


def is_of_this_machine(ip: IPAddress) -> bool:
    """Whether an interface of this machine has an address."""
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(ip), 0))
    except OSError:
        return False
    return True


def _check_port(index: int, own: str) -> None:
    with socket.socket() as probe:
        # As TensorFlow does, or a port that was in use just now is not free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", split(own)[1]))
        except OSError as error:
            reason = (
                "in use by another process"
                if error.errno == errno.EADDRINUSE
                else f"not to be had ({error.strerror})"
            )
            raise ClusterError(
                f"The port of worker {index} is {reason}. Received: '{own}'. "
                "Choose a free port, or end what uses it."
            ) from error
