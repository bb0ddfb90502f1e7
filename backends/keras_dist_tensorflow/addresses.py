"""Addresses of workers, and checks that they can be used."""

import errno
import ipaddress
import socket
import time

from keras_dist.core.plan import Cluster
from keras_dist.errors import ClusterError

# Seconds to wait until other workers' host names resolve: some schedulers
# announce a host when it starts.
NAMING = 60.0

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def check_addresses(cluster: Cluster, seconds: float) -> None:
    """Checks that all host names resolve and that this worker's port is free.

    Waits up to `seconds`, and at most a minute, for other workers' names.

    Raises:
        ClusterError: For an unknown host or a port that can't be used.
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
    """Splits `"host:port"`, without the brackets of an IPv6 address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def ip_addresses(host: str) -> list[IPAddress]:
    """Resolves a host name; returns an empty list if it is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [ipaddress.ip_address(str(entry[4][0])) for entry in found]


def is_of_this_machine(ip: IPAddress) -> bool:
    """Returns whether an interface of this machine has an address."""
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(ip), 0))
    except OSError:
        return False
    return True


def _check_port(index: int, own: str) -> None:
    with socket.socket() as probe:
        # As TensorFlow does: otherwise a port that was closed just now counts
        # as in use.
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
