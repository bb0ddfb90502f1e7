"""Ports that nothing listens on."""

import socket

from keras_dist.launch import addresses


def free_block(count):
    """The first of some ports that follow each other and are free."""
    while True:
        (address,) = addresses.free_addresses(1)
        first = int(address.rpartition(":")[2])
        if all(_is_free(first + i) for i in range(count)):
            return first


def _is_free(port):
    with socket.socket() as listener:
        try:
            listener.bind((addresses.LOOPBACK, port))
        except OSError:
            return False
    return port in addresses._PORTS
