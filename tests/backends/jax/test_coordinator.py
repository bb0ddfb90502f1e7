"""The coordinator's roll call, and what it needs."""

import contextlib
import socket
import subprocess
import sys
import threading

import pytest

from keras_dist.launch.addresses import free_addresses
from keras_dist_jax.addresses import listen
from keras_dist_jax.coordinator import call_roll
from keras_dist_jax.coordinator import has_connections


class Caller:
    """Somebody who answers a roll call.

    Args:
        address: Tuple of host and port.
        says: Bytes.
    """

    def __init__(self, address, says):
        self._socket = socket.create_connection(address, timeout=100)
        self._socket.sendall(says)
        self._lines = self._socket.makefile("rb")

    def hears(self):
        return self._lines.readline().strip().decode()

    def close(self):
        self._lines.close()
        self._socket.close()


@pytest.fixture
def roll():
    """A roll call of two workers: its thread, and a callable for answers."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1:0"))
        thread = threading.Thread(target=call_roll, args=(listener, 2))
        thread.start()
        stack.callback(thread.join, timeout=100)

        def answer(says):
            caller = Caller(listener.getsockname(), says)
            stack.callback(caller.close)
            return caller

        yield thread, answer


def finish(thread, callers):
    for caller in callers:
        while (line := caller.hears()) != "go":
            assert line  # without one, the connection has ended
        caller.close()
    thread.join(timeout=100)
    assert not thread.is_alive()


def test_workers_hear_who_is_there(roll):
    thread, answer = roll
    second = answer(b"1 2\n")
    assert second.hears() == "1"
    first = answer(b"0 2\n")
    assert first.hears() == "0 1"
    finish(thread, [first, second])


@pytest.mark.parametrize("says", [b"2 2\n", b"0 3\n", b"1 2\n", b"GET / HTTP"])
def test_who_does_not_belong_is_refused(roll, says):
    thread, answer = roll
    second = answer(b"1 2\n")
    assert second.hears() == "1"
    assert answer(says).hears() == "refused"
    finish(thread, [answer(b"0 2\n"), second])


def test_a_worker_may_come_back(roll):
    thread, answer = roll
    gone = answer(b"1 2\n")
    assert gone.hears() == "1"
    gone.close()
    first = answer(b"0 2\n")
    while (line := first.hears()) != "0":  # at first both may seem to be there
        assert line
    finish(thread, [first, answer(b"1 2\n")])


def test_connections_are_seen():
    # None that outgoing connections of others get.
    with listen(*free_addresses(1)) as listener:
        port = listener.getsockname()[1]
        assert not has_connections(port)
        with socket.create_connection(listener.getsockname()):
            assert has_connections(port)


def test_it_needs_no_keras():
    code = (
        "import sys, keras_dist_jax.coordinator as c, keras_dist_jax; "
        "assert callable(c.serve); "
        "sys.exit('keras' in sys.modules or 'jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
