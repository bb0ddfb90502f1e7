"""Addresses that workers listen on and look for."""

import errno
import socket
import time


class AddressError(ValueError):
    """An address is unknown, taken, or of another machine."""


def split(address: str) -> tuple[str, int]:
    """The host and the port of `"host:port"`.

    Raises:
        AddressError: If it is something else.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise AddressError(
            f"Received: {address!r}. Expected: 'host:port', such as "
            "'10.0.0.1:9000'."
        )
    return host.strip("[]"), int(port)


def resolve(address: str) -> tuple[str, int]:
    """The number of a host, and the port.

    Raises:
        AddressError: If nobody knows the host.
    """
    host, port = split(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(
            f"The host of {address!r} is unknown ({error.strerror}). "
            "Expected: a name or number of a host that this one can reach."
        ) from error
    # What everybody listens on has to be what everybody looks for.
    number = min(found, key=lambda each: each[0] != socket.AF_INET)[4][0]
    return str(number), port


def numeric(address: str) -> str:
    """The address with the number of its host, as URLs have it."""
    host, port = resolve(address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: str, patience: float = 5.0) -> socket.socket:
    """A socket that listens on an address, and on no other.

    Args:
        address: String, `"host:port"`, of this machine.
        patience: Float, seconds for which it is tried again: one that
            listened until just now may still be ending.

    Raises:
        AddressError: If it is unknown, taken or of another machine.
    """
    host, port = resolve(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    deadline = time.monotonic() + patience
    while True:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                reason = "is taken by another process"
            else:
                reason = f"can't be listened on here ({error.strerror})"
            raise AddressError(
                f"The address {address!r} {reason}. Expected: a free port of "
                "the first worker's machine. Choose another one, or end what "
                "uses it."
            ) from error
