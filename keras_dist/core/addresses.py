"""The host at which a worker is reached, where its launcher names none."""

import socket

from keras_dist.core.plan import Cluster


def split_address(address: str) -> tuple[str, int]:
    """Splits `"host:port"`, without the brackets of an IPv6 address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def own_host(cluster: Cluster) -> str:
    """Returns the host at which other workers reach this worker.

    Launchers such as torchrun name the first worker's host alone. The address
    of another worker is then empty, and its host is the address from which it
    would reach the first one.
    """
    own = cluster.addresses[cluster.index]
    if own:
        return split_address(own)[0]
    # Connecting a datagram socket sends nothing.
    family, _, _, _, where = socket.getaddrinfo(
        *split_address(cluster.leader), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])
