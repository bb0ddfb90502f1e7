"""Parsing, resolving and binding of the addresses that workers use."""

import errno
import socket
import time


class AddressError(ValueError):
    """An address that is malformed, unknown, taken or of another machine."""


def split(address: str) -> tuple[str, int]:
    """Splits `"host:port"` into the host and the port."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise AddressError(
            f"The form of an address is wrong. Received: {address!r}. "
            "Expected: 'host:port', such as '10.0.0.1:9000'."
        )
    return host.strip("[]"), int(port)


def resolve(address: str) -> tuple[str, int]:
    """Returns the IP address of an address's host, and the port."""
    host, port = split(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(
            f"The host of {address!r} is unknown ({error.strerror}). "
            "Expected: a host name or IP address that this machine can look "
            "up."
        ) from error
    # A host may have several addresses. All workers must choose the same one,
    # because the coordinator listens on that one only.
    number = min(found, key=lambda each: each[0] != socket.AF_INET)[4][0]
    return str(number), port


def numeric(address: str) -> str:
    """Returns the address as `"ip:port"`, an IPv6 host in brackets."""
    host, port = resolve(address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: str, patience: float = 5.0) -> socket.socket:
    """Opens a socket on an address; waits `patience` s if it is in use."""
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
                reason = (
                    "can't be opened for listening on this machine "
                    f"({error.strerror})"
                )
            raise AddressError(
                f"The address {address!r} {reason}. Expected: a free port of "
                "the first worker's machine. Choose another port, or end the "
                "process that uses this one."
            ) from error
