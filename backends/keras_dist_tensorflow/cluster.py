"""The workers of a cluster: their addresses, their start, and lost ones.

TensorFlow's server listens on every interface. A filter on its socket drops
packets to other addresses than the worker's; it works on Linux only.
"""

import contextlib
import ctypes
import ipaddress
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_dist.errors import ClusterError
from keras_dist.errors import WorkerLostError
from keras_dist.plugins import Cluster
from keras_dist.plugins import CommunicationOptions
from keras_dist.plugins import answer_roll
from keras_dist.plugins import lost_error
from keras_dist.plugins import open_listener
from keras_dist.plugins import split
from keras_dist_tensorflow import runtime_internals

# Default seconds that workers wait for one another when they start.
JOINING = 300.0
# Seconds without a heartbeat after which a worker counts as lost; options with
# a shorter timeout make them fewer.
SILENCE = 30.0
# Seconds to wait until other workers' host names resolve: some schedulers
# announce a host when it starts.
NAMING = 60.0

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_JOB = "worker"
_TASK = re.compile(r"/job:worker/(?:replica:\d+/)?task:(\d+)")
# Milliseconds in which a living worker answers.
_ANSWER_MS = 3000
_KINDS = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
    tf.errors.FailedPreconditionError,
)
_OF_WORKERS = ("Collective", "CoordinationService", "remote target /job:")
_SAID = re.compile(r"Worker (\d+) at \S+ (?:ended|stopped)[^\n]*")
_SILENT = re.compile(r"stopped sending heartbeats\):\n((?:/job:.*\n?)+)")
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


def await_names(cluster: Cluster, seconds: float) -> None:
    """Checks that all workers' hosts resolve, others' in time."""
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


def ip_addresses(host: str) -> list[IPAddress]:
    """Resolves a host name; returns an empty list if it is unknown."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [ipaddress.ip_address(str(entry[4][0])) for entry in entries]


def is_of_this_machine(ip: IPAddress) -> bool:
    family = socket.AF_INET if ip.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(ip), 0))
    except OSError:
        return False
    return True


def task_name(index: int) -> str:
    return f"/job:{_JOB}/replica:0/task:{index}"


def tasks_in(text: str) -> list[int]:
    """Returns the indices of the workers that a message names, each once."""
    return list(dict.fromkeys(int(task) for task in _TASK.findall(text)))


def local_devices(kind: str) -> list[Any]:
    """Returns this worker's logical devices; TensorFlow lists everyone's."""
    devices = tf.config.list_logical_devices(kind)
    task = runtime_internals.runtime_task()
    return [
        device
        for device in devices
        if tf.DeviceSpec.from_string(device.name).task in (None, task)
    ]


def start(cluster: Cluster, options: CommunicationOptions) -> None:
    """Starts this worker's server and waits for the other workers."""
    if runtime_internals.has_started():
        raise RuntimeError(
            "The workers of a cluster must be joined at program startup. "
            "TensorFlow has made a tensor or listed its devices already. "
            "Make the MultiWorkerMirroredStrategy before anything else, "
            "straight after the imports."
        )
    seconds = options.timeout_seconds or JOINING
    await_names(cluster, seconds)
    # Where the workers meet, and until then no other process has the port.
    with open_listener(cluster, everywhere=True) as listener:
        listen_to_own_address(cluster)
        answer_roll(cluster, seconds, listener if cluster.is_chief else None)
    silence = min(SILENCE, options.timeout_seconds or SILENCE)
    runtime_internals.configure_runtime(
        job=_JOB,
        addresses=cluster.addresses,
        index=cluster.index,
        joining_ms=round(seconds * 1000),
        silence_ms=max(1000, round(silence * 1000)),
    )
    # TensorFlow's coordination service catches SIGTERM for listeners to
    # preemptions. There are none here, so a worker would survive the signal.
    with interruptible(), reaction_kept(signal.SIGTERM):
        try:
            runtime_internals.start_runtime()
        except tf.errors.OpError as error:
            raise _not_joined(cluster, seconds, error) from error


@contextlib.contextmanager
def reaction_kept(number: int) -> Iterator[None]:
    """Restores a signal's handler, native ones too, at the end."""
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    # `struct sigaction` is smaller on every system. Python's `signal.signal`
    # works in the main thread alone and can't restore native handlers.
    before = ctypes.create_string_buffer(1024)
    if sigaction(number, None, before):
        raise OSError(ctypes.get_errno(), "sigaction")
    try:
        yield
    finally:
        sigaction(number, before, None)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Lets Ctrl-C end the process while TensorFlow waits with the GIL."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _not_joined(
    cluster: Cluster, seconds: float, error: tf.errors.OpError
) -> Exception:
    address = cluster.addresses[cluster.index]
    if "Could not start gRPC server" in error.message:
        return ClusterError(
            f"Worker {cluster.index} can't listen at its address '{address}': "
            f"{error.message}. Choose a free port, or end the process that "
            "uses it."
        )
    # TensorFlow lists missing workers after these words. Without a list the
    # chief is missing.
    _, _, listed = error.message.partition("timed out task names:")
    missing = tasks_in(listed.partition("Additional")[0]) or [0]
    return WorkerLostError(
        f"Not all of the {cluster.num_workers} workers joined within "
        f"{seconds:g} seconds: {_names(missing, cluster)} did not. See what "
        "they printed, start all workers at about the same time, check that "
        "this machine can reach those addresses, or raise `timeout_seconds` "
        "of `CommunicationOptions`."
    )


def explained(
    error: BaseException, cluster: Cluster, timeout: float
) -> BaseException:
    """Implements `Workers.explain`; collectives take `timeout` seconds."""
    if not isinstance(error, _KINDS) or not any(
        word in error.message for word in _OF_WORKERS
    ):
        return error
    return lost_error(cluster, _reason(error.message, cluster, timeout))


def _reason(message: str, cluster: Cluster, timeout: float) -> str:
    said = _SAID.search(message)
    if said:
        return said[0].rstrip(".")[0].lower() + said[0].rstrip(".")[1:]
    silent = _SILENT.search(message)
    silent_tasks = tasks_in(silent[1]) if silent else []
    lost = _others(silent_tasks, cluster)
    if lost:
        return f"{_names(lost, cluster)} stopped answering"
    if silent_tasks:
        return "they count it as lost, because it stopped answering"
    lost = [
        index
        for index in _others(range(cluster.num_workers), cluster)
        if not runtime_internals.is_healthy(task_name(index), _ANSWER_MS)
    ]
    if lost:
        return f"{_names(lost, cluster)} can't be reached"
    # A worker named in the message may have ended and been restarted by now.
    lost = _others(tasks_in(message), cluster)
    if lost:
        return f"the connection to {_names(lost, cluster)} broke"
    return (
        "every worker is alive, but not all of them took part within "
        f"{timeout:g} seconds. They may run different code or have different "
        "data, or one of them is busy with something else: then raise "
        "`timeout_seconds` of `CommunicationOptions`"
    )


def _others(indices: "list[int] | range", cluster: Cluster) -> list[int]:
    return [
        index
        for index in indices
        if index != cluster.index and index < cluster.num_workers
    ]


def _names(indices: list[int], cluster: Cluster) -> str:
    return ", ".join(
        f"worker {index} at {cluster.addresses[index]}" for index in indices
    )


_Instruction = tuple[int, int, int, int]


def listen_to_own_address(cluster: Cluster) -> None:
    """Drops connections to other addresses than this worker's."""
    if not sys.platform.startswith("linux"):
        return
    host, port = split(cluster.addresses[cluster.index])
    ips = ip_addresses(host)
    if not ips:
        raise ClusterError(
            "This worker's host can't be looked up any more, so its server "
            "can't be limited to one address. Received: "
            f"'{cluster.addresses[cluster.index]}'. Expected: a name or an IP "
            "address that this machine can look up each time."
        )
    if not all(is_of_this_machine(ip) and not ip.is_unspecified for ip in ips):
        return  # as behind a forwarded port
    if all(ip.is_loopback for ip in ips) and not _all_are_here(cluster):
        # This machine resolves its own name to loopback; other workers reach
        # it at another address.
        return
    program = _program([ip for ip in ips if not ip.is_loopback])
    for number in os.listdir("/proc/self/fd"):
        _narrow(int(number), port, program)


def _all_are_here(cluster: Cluster) -> bool:
    hosts = [ip_addresses(split(address)[0]) for address in cluster.addresses]
    return all(ips and all(ip.is_loopback for ip in ips) for ips in hosts)


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
            b"".join(
                struct.pack("HBBI", *instruction) for instruction in program
            )
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
