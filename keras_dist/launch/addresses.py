"""Addresses of workers, on one machine or on several hosts."""

import contextlib
import secrets
import socket
from collections.abc import Collection
from dataclasses import dataclass

from keras_dist.joining.addresses import is_address

LOOPBACK = "127.0.0.1"

LAST_PORT = 65535

# Below the ephemeral ports, which systems give to sockets bound to port 0.
_PORTS = range(20000, 32768)
_MAX_TRIES = 100


@dataclass(frozen=True)
class Addresses:
    """The addresses of a job's processes, each as `"host:port"`.

    The job's word is the same for all workers of one start, on each host.
    """

    workers: tuple[str, ...]
    coordinator: str
    job: str

    @property
    def all(self) -> frozenset[str]:
        return frozenset((*self.workers, self.coordinator))


@dataclass(frozen=True)
class AddressLayout:
    """All workers of a job, and those that this machine starts.

    Each host is `"host:port"`, with the port of its first worker; its others
    take the next ones. Without hosts, all workers are here, on free ports.
    """

    num_workers: int
    hosts: tuple[str, ...] = ()
    host_index: int = 0

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(
                "Expected: at least 1 worker. Received: "
                f"{self.num_workers} workers."
            )
        num_hosts = max(1, len(self.hosts))
        if not 0 <= self.host_index < num_hosts:
            raise ValueError(
                f"The host index must be from 0 to {num_hosts - 1}, this "
                "machine's position in the list of hosts. Received: "
                f"{self.host_index}, with {num_hosts} hosts."
            )
        if self.num_workers % num_hosts:
            raise ValueError(
                "Each host starts the same number of workers, so the number "
                "of workers must be a multiple of the number of hosts. "
                f"Received: {self.num_workers} workers on {num_hosts} hosts."
            )
        taken: set[str] = set()
        for index, host in enumerate(self.hosts):
            # The coordinator is on the first host, after its workers.
            ports = set(_ports(host, self.num_local + (index == 0)))
            if taken & ports:
                raise ValueError(
                    f"Host {index}, {host!r}, needs {len(ports)} ports, but "
                    f"another host has {', '.join(sorted(taken & ports))}. "
                    "Give hosts on the same machine different ports."
                )
            taken |= ports

    @property
    def num_local(self) -> int:
        """The number of workers that each host starts."""
        return self.num_workers // max(1, len(self.hosts))

    @property
    def local(self) -> range:
        """The indices of the workers that this machine starts."""
        first = self.host_index * self.num_local
        return range(first, first + self.num_local)

    def addresses(self, avoid: Collection[str] = ()) -> Addresses:
        """Returns all addresses; free ports are none of those in `avoid`."""
        if not self.hosts:
            *workers, coordinator = free_addresses(self.num_workers + 1, avoid)
            word = f"keras-dist run {secrets.token_hex(4)}"
            return Addresses(tuple(workers), coordinator, word)
        workers = [
            address
            for host in self.hosts
            for address in _ports(host, self.num_local)
        ]
        coordinator = _ports(self.hosts[0], self.num_local + 1)[-1]
        word = f"keras-dist run on {', '.join(self.hosts)}"
        return Addresses(tuple(workers), coordinator, word)


def parse_hosts(text: str) -> tuple[str, ...]:
    """Parses comma-separated hosts, each with a port."""
    hosts = tuple(part.strip() for part in text.split(","))
    for host in hosts:
        if not is_address(host):
            raise ValueError(
                f"The host {host!r} is not a name and a port. Expected: a name "
                "and a port, such as a:9000, with commas between hosts; "
                "[fd00::2]:9000 for an IPv6 address."
            )
    return hosts


def free_addresses(count: int, avoid: Collection[str] = ()) -> list[str]:
    """Returns different loopback addresses that nothing listens on."""
    addresses: list[str] = []
    with contextlib.ExitStack() as bound:
        # Sockets stay bound until all are found: a port let go may be found
        # again.
        while len(addresses) < count:
            listener = bound.enter_context(socket.socket())
            _bind(listener)
            address = f"{LOOPBACK}:{listener.getsockname()[1]}"
            if address not in avoid:
                addresses.append(address)
    return addresses


def _bind(listener: socket.socket) -> None:
    """Binds a socket to a random port, if possible not an ephemeral one."""
    # So the system gives the port to nobody else before a worker listens.
    for _ in range(_MAX_TRIES):
        try:
            listener.bind((LOOPBACK, secrets.choice(_PORTS)))
        except OSError:  # the port is taken
            continue
        return
    listener.bind((LOOPBACK, 0))


def _ports(host: str, count: int) -> list[str]:
    """Returns `count` addresses of a host, with consecutive ports."""
    name, _, first = host.rpartition(":")
    if int(first) + count - 1 > LAST_PORT:
        raise ValueError(
            f"Host {host!r} needs {count} ports from {first} on, but the last "
            f"port is {LAST_PORT}. Choose a lower port."
        )
    return [f"{name}:{int(first) + i}" for i in range(count)]
