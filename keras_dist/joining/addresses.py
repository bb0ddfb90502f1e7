"""Addresses at which workers meet: parsing, look-up, and listening."""

import contextlib
import errno
import pathlib
import re
import socket
import time
from collections.abc import Iterator

from keras_dist.errors import ClusterError

# States of sockets in Linux' tables.
CONNECTED, _LISTENS = "01", "0A"


_ADDRESS = re.compile(r"(?:\[[^\[\]\s]+\]|[^\[\]:/\s]+):(\d{1,5})")


def is_address(text: str) -> bool:
    """Tells whether a text is `"host:port"`, an IPv6 host in brackets."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match[1]) < 65536


def split(address: str) -> tuple[str, int]:
    """Splits `"host:port"`, without the brackets of an IPv6 address."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ClusterError(
            f"The form of an address is wrong. Received: {address!r}. "
            "Expected: 'host:port', such as '10.0.0.1:9000'."
        )
    return host.strip("[]"), int(port)


def resolve(address: str) -> tuple[str, int]:
    """Returns the IP address of an address's host, and the port."""
    host, port = split(address)
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ClusterError(
            f"The host of {address!r} is unknown ({error.strerror}). "
            "Expected: a host name or IP address that this machine can look "
            "up."
        ) from error
    # A host may have several addresses. All workers must choose the same one,
    # because the first worker listens on that one only.
    number = min(
        candidates, key=lambda candidate: candidate[0] != socket.AF_INET
    )[4][0]
    return str(number), port


def numeric(address: str) -> str:
    """Returns the address as `"ip:port"`, an IPv6 host in brackets."""
    host, port = resolve(address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_host(address: str, leader: str) -> str:
    """Returns the IP address at which other workers reach this worker.

    Launchers such as torchrun name the first worker's host alone. The address
    of another worker is then empty, and its host is the address from which it
    would reach the first one.
    """
    if address:
        return resolve(address)[0]
    # Connecting a datagram socket sends nothing.
    family, _, _, _, where = socket.getaddrinfo(
        *split(leader), type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def listen(
    address: str, patience: float = 5.0, everywhere: bool = False
) -> socket.socket:
    """Opens a socket that listens on an address.

    Args:
        address: String, `"host:port"`.
        patience: Float, seconds to wait for a port that is in use.
        everywhere: Boolean, true to listen on every interface, as a server
            that comes after this socket does.

    Raises:
        ClusterError: If the port is in use, or the address is of another
            machine.
    """
    host, port = ("", split(address)[1]) if everywhere else resolve(address)
    both = everywhere and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.create_server(
                (host, port),
                family=family,
                backlog=128,
                dualstack_ipv6=both,
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = (
                    "can't be opened for listening on this machine "
                    f"({error.strerror})"
                )
            elif time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            else:
                reason = f"is in use: {user_of(port)} has its port"
            raise ClusterError(
                f"The address {address!r} {reason}.\nExpected: a free port of "
                "this machine. Choose another port, or end the process that "
                "uses this one. It may be a worker of another job, or one "
                "that is left from an earlier start."
            ) from error


def user_of(port: int) -> str:
    """Describes the process of this machine that listens on a port."""
    sockets = {f"socket:[{number}]" for number in sockets_of(port, _LISTENS)}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        # Processes end meanwhile, and those of other users are closed books.
        with contextlib.suppress(OSError):
            for file in folder.joinpath("fd").iterdir():
                if str(file.readlink()) in sockets:
                    words = folder.joinpath("cmdline").read_bytes().split(b"\0")
                    command = b" ".join(words).decode(errors="replace").strip()
                    return f"process {folder.name} ({command[:200]})"
    return "another process"


def sockets_of(port: int, state: str) -> Iterator[str]:
    """Returns the numbers of a port's sockets that are in a state, on Linux."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            table = pathlib.Path("/proc/self/net", name).read_text()
            for line in table.splitlines()[1:]:
                words = line.split()
                local_port = int(words[1].rpartition(":")[2], 16)
                if (local_port, words[3]) == (port, state):
                    yield words[9]
