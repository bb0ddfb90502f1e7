"""A server on every interface of a host, and one who attacks it from another.

`filter_script.py INDEX PORT filtered|open`: host 0 serves, host 1 attacks.
"""

import socket
import sys

from workers.two_hosts import ADDRESSES
from workers.two_hosts import OTHER

# Seconds that a packet may be dropped for, before it counts as refused.
_PATIENCE = 2.0


def serve(port, is_filtered):
    """Serves one connection to its end, as TensorFlow's server listens."""
    start_filter = _filter(port) if is_filtered else None
    with socket.create_server(
        ("::", port), family=socket.AF_INET6, dualstack_ipv6=True
    ) as server:
        if start_filter is not None:
            start_filter()
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"x")
            connection.recv(1)


def _filter(port):
    """What starts it. Whoever needs no TensorFlow starts without it."""
    from keras_dist.core.plan import Cluster
    from keras_dist_tensorflow.cluster import listen_to_own_address

    addresses = tuple(f"{address}:{port}" for address in ADDRESSES)
    cluster = Cluster(0, addresses[0], addresses)
    return lambda: listen_to_own_address(cluster)


def attack(port):
    """Connects to both addresses, and says which answered."""
    while True:
        try:
            own = socket.create_connection((ADDRESSES[0], port), _PATIENCE)
            break
        except OSError:  # it has not started yet
            continue
    with own:
        own.recv(1)  # the filter is there
        try:
            socket.create_connection((OTHER, port), _PATIENCE).close()
            print("both")
        except TimeoutError:
            print("its own")


if __name__ == "__main__":
    index, port, mode = sys.argv[1:]
    if index == "0":
        serve(int(port), mode == "filtered")
    else:
        attack(int(port))
