"""A packet filter that limits this worker's server to its own address.

TensorFlow's server listens on every interface, without an option for fewer.
Once it has started, a filter on its socket drops packets to any address but
the worker's own. This works on Linux only, and needs no privileges.
"""

import ctypes
import os
import socket
import struct
import sys

from keras_dist.core.plan import Cluster
from keras_dist.errors import ClusterError
from keras_dist_tensorflow.cluster import IPAddress
from keras_dist_tensorflow.cluster import ip_addresses
from keras_dist_tensorflow.cluster import is_of_this_machine
from keras_dist_tensorflow.cluster import split

# Constants of Linux' headers: a socket option, and instructions of filters.
_SO_ATTACH_FILTER = 26
_LOAD_WORD = 0x20
_LOAD_BYTE = 0x30
_AND = 0x54
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06
# Offset at which a filter finds the IP header.
_HEADER = 0xFFF00000
_ALL = 0xFFFFFFFF

_Instruction = tuple[int, int, int, int]


def listen_to_own_address(cluster: Cluster) -> None:
    """Drops connections to other addresses than that of this worker.

    The server has started. Nothing is done where the address belongs to no
    interface of this machine, as behind a forwarded port.
    """
    if not sys.platform.startswith("linux"):
        return
    host, port = split(cluster.addresses[cluster.index])
    ips = ip_addresses(host)
    if not ips:
        raise ClusterError(
            "This worker's host can't be looked up any more, so its server "
            "can't be kept to one address. Received: "
            f"'{cluster.addresses[cluster.index]}'. Expected: a name or an IP "
            "address that this machine can look up each time."
        )
    if not all(is_of_this_machine(ip) and not ip.is_unspecified for ip in ips):
        return
    if all(ip.is_loopback for ip in ips) and not _all_are_here(cluster):
        # This machine resolves its own name to loopback; other workers reach
        # it at another address.
        return
    program = _program([ip for ip in ips if not ip.is_loopback])
    for number in os.listdir("/proc/self/fd"):
        _narrow(int(number), port, program)


def _all_are_here(cluster: Cluster) -> bool:
    found = [ip_addresses(split(each)[0]) for each in cluster.addresses]
    return all(ips and all(ip.is_loopback for ip in ips) for ips in found)


def _narrow(number: int, port: int, program: list[_Instruction]) -> None:
    """Attaches a filter if file `number` is a socket listening at `port`."""
    try:
        copy = socket.socket(fileno=os.dup(number))
    except OSError:  # no socket, or closed by now
        return
    with copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6):
            return
        listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if not listens or copy.getsockname()[1] != port:
            return
        code = ctypes.create_string_buffer(
            b"".join(struct.pack("HBBI", *each) for each in program)
        )
        copy.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("HL", len(program), ctypes.addressof(code)),
        )


def _program(ips: list[IPAddress]) -> list[_Instruction]:
    """Returns a filter that accepts packets to some addresses and loopback."""
    loopback = [
        (_LOAD_WORD, 0, 0, _HEADER + 16),
        (_AND, 0, 0, 0xFF000000),
        (_JUMP_IF_EQUAL, 0, 1, 127 << 24),
        (_RETURN, 0, 0, _ALL),
    ]
    version_4 = loopback + _sent_to(16, [ip for ip in ips if ip.version == 4])
    version_6 = _sent_to(24, [ip for ip in ips if ip.version == 6])
    version_6 += _sent_to(24, ip_addresses("::1"))
    return [
        (_LOAD_BYTE, 0, 0, _HEADER),
        (_AND, 0, 0, 0xF0),
        (_JUMP_IF_EQUAL, 0, len(version_4) + 1, 0x40),
        *version_4,
        (_RETURN, 0, 0, 0),
        *version_6,
        (_RETURN, 0, 0, 0),
    ]


def _sent_to(offset: int, ips: list[IPAddress]) -> list[_Instruction]:
    program: list[_Instruction] = []
    for ip in ips:
        words = struct.unpack(f">{len(ip.packed) // 4}I", ip.packed)
        for place, word in enumerate(words):
            # Instructions until the next address.
            skipped = 2 * (len(words) - place - 1) + 1
            program += [
                (_LOAD_WORD, 0, 0, _HEADER + offset + 4 * place),
                (_JUMP_IF_EQUAL, 0, skipped, word),
            ]
        program.append((_RETURN, 0, 0, _ALL))
    return program
