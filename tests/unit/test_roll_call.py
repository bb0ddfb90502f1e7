"""Workers of one job find each other, and others are refused by name."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import socket
import threading

import pytest

import keras_dist
from keras_dist.core.plan import Cluster
from keras_dist.errors import ClusterError
from keras_dist.errors import WorkerLostError
from keras_dist.joining.addresses import listen
from keras_dist.joining.answering import answer_roll
from keras_dist.joining.answering import facts_of
from keras_dist.joining.answering import open_listener
from keras_dist.joining.roll_call import Facts
from keras_dist.joining.roll_call import call_roll
from keras_dist.joining.roll_call import calling_roll
from keras_dist.launch.addresses import free_addresses

FACTS = Facts(job="job 7", workers=2, backend="jax")
LIMIT = 30


def said(index, process=None, **others):
    """The line of a worker that fits, but for some facts."""
    line = {
        "index": index,
        "process": process or f"process {index}",
        "token": process,
        **dataclasses.asdict(FACTS),
        **others,
    }
    return json.dumps(line).encode() + b"\n"


class Caller:
    """Somebody who answers a roll call.

    Args:
        address: Tuple of host and port.
        says: Bytes.
    """

    def __init__(self, address, says):
        self._socket = socket.create_connection(address, timeout=LIMIT)
        self._socket.sendall(says)
        self._lines = self._socket.makefile("rb")

    def hears(self, name):
        """The first thing of a name that is said to it; `None` without one."""
        for line in self._lines:
            told = json.loads(line)
            if name in told:
                return told[name]
        return None

    def close(self):
        self._lines.close()
        self._socket.close()


@pytest.fixture
def roll():
    """A roll call of two workers: its thread, and a callable for answers."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen("127.0.0.1:0"))
        thread = threading.Thread(
            target=call_roll, args=(listener, FACTS), daemon=True
        )
        thread.start()
        stack.callback(thread.join, timeout=LIMIT)

        def answer(says):
            caller = Caller(listener.getsockname(), says)
            stack.callback(caller.close)
            return caller

        yield thread, answer


def finish(thread, callers):
    for caller in callers:
        assert caller.hears("go")
        caller.close()
    thread.join(timeout=LIMIT)
    assert not thread.is_alive()


def test_a_worker_of_another_job_is_refused_and_the_others_go_on(roll):
    thread, answer = roll
    second = answer(said(1))
    assert second.hears("present") == [1]
    reason = answer(said(0, "process 5 on n1", job="job 8")).hears("refused")
    assert "Received: worker 0 of 'job 8', process 5 on n1" in reason
    assert "Expected: workers of 'job 7'" in reason
    assert "`port_base`" in reason
    assert "keras-dist run" in reason
    (stranger,) = second.hears("turned_away")
    assert stranger == "worker 0 of 'job 8', process 5 on n1"
    first = answer(said(0))
    assert first.hears("present") == [0, 1]
    finish(thread, [first, second])


@pytest.mark.parametrize("says", [b"0 2\n", b"GET / HTTP", b"[]\n", b"{}\n"])
def test_what_is_no_worker_harms_nobody(roll, says):
    thread, answer = roll
    second = answer(said(1))
    assert second.hears("present") == [1]
    assert answer(says).hears("refused") is None
    finish(thread, [answer(said(0)), second])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (said(0, backend="torch"), "backend='torch' from worker 0, process 0"),
        (said(0, version="0.1"), "version='0.1' from worker 0"),
        (said(2, workers=3), "workers=3 from worker 2"),
        (said(1, "process 9"), "Received: process 1, and process 9"),
    ],
    ids=["backend", "version", "workers", "twice"],
)
def test_all_are_refused_if_one_of_the_job_does_not_fit(roll, line, told):
    thread, answer = roll
    second = answer(said(1))
    assert second.hears("present") == [1]
    reason = answer(line).hears("refused")
    assert told in reason
    assert "'job 7'" in reason
    assert second.hears("refused") == reason
    if json.loads(line)["index"] != 0:
        # It was about to come.
        assert answer(said(0)).hears("refused") == reason
    # Another start.
    finish(thread, [answer(said(0)), answer(said(1))])


@pytest.mark.parametrize("closes", [True, False])
def test_a_worker_may_come_back(roll, closes):
    thread, answer = roll
    gone = answer(said(1))
    assert gone.hears("present") == [1]
    if closes:
        gone.close()
    again = answer(said(1))
    finish(thread, [answer(said(0)), again])


def cluster(index, job="job 7", number=2, address=None):
    address = address or free_addresses(1)[0]
    rest = tuple(f"other:{1 + i}" for i in range(number - 1))
    return Cluster(index, address, (address, *rest), job=job)


def in_thread(fn, *args):
    """Calls a function in a thread; returns a wait for what it raised."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    future = pool.submit(fn, *args)
    pool.shutdown(wait=False)
    return functools.partial(future.exception, timeout=LIMIT)


def test_workers_meet_at_the_chief():
    chief = cluster(0)
    others = [cluster(1, address=chief.leader)]
    waits = [in_thread(answer_roll, each, LIMIT) for each in others]
    with listen(chief.leader) as listener:
        answer_roll(chief, LIMIT, listener)
        assert [wait() for wait in waits] == [None]
        # The address is free again at once, as the framework's service needs.
        listener.close()
        listen(chief.leader, patience=0).close()


def test_who_never_came_and_who_was_turned_away():
    chief = cluster(0, number=3)
    stranger = cluster(1, job="job 8", number=3, address=chief.leader)
    wait = in_thread(answer_roll, stranger, LIMIT)
    with (
        listen(chief.leader) as listener,
        pytest.raises(WorkerLostError) as caught,
    ):
        answer_roll(chief, 2.0, listener)
    refused = wait()
    assert isinstance(refused, ClusterError)
    assert "worker 1 of 'job 8'" in str(refused)
    assert "workers of 'job 7'" in str(refused)
    text = str(caught.value)
    assert f"Turned away: worker 1 of 'job 8', process {os.getpid()}" in text
    assert "Missing: worker 1 (other:1), worker 2 (other:2)" in text


def test_nothing_answers():
    worker = cluster(1)
    with pytest.raises(WorkerLostError, match="Nothing answered at 127"):
        answer_roll(worker, 0.5)


def test_something_else_answers():
    """As the service of a job that runs already would."""
    worker = cluster(1)
    with listen(worker.leader) as listener:

        def close_all():
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()

        wait = in_thread(close_all)
        with pytest.raises(WorkerLostError, match="a job that runs already"):
            answer_roll(worker, 1.0)
        listener.shutdown(socket.SHUT_RDWR)
        assert wait() is None


def test_the_one_who_calls_the_roll_ends():
    """Its next start may be of a later job, which is not joined."""
    worker = cluster(2, number=3)
    with listen(worker.leader) as listener:

        def call():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b'{"present": [0, 2], "turned_away": []}\n')

        wait = in_thread(call)
        with pytest.raises(WorkerLostError) as caught:
            answer_roll(worker, LIMIT)
        assert wait() is None
    text = str(caught.value)
    assert f"joined: worker 0 at {worker.leader} ended" in text
    assert "Missing: worker 1 (other:1). " in text


@pytest.mark.parametrize("job", ["job 7", "job 8"])
def test_a_second_chief_learns_who_is_there(job):
    chief = cluster(0)
    second = dataclasses.replace(chief, job=job)
    # It is another process, in fact.
    line = said(0, "process 5", **dataclasses.asdict(facts_of(chief)))
    with (
        listen(chief.leader) as listener,
        calling_roll(listener, facts_of(chief)),
        contextlib.closing(Caller(listener.getsockname(), line)) as first,
    ):
        assert first.hears("present") == [0]
        with pytest.raises(ClusterError) as caught:
            open_listener(second)
        if job == "job 7":
            assert first.hears("refused") in str(caught.value)
    told = {
        "job 7": "Two processes are worker 0 of 'job 7'. Received: process 5,",
        "job 8": "Received: worker 0 of 'job 8', process",
    }
    assert told[job] in str(caught.value)


def test_without_a_word_the_addresses_stand_for_the_job():
    one, same = (cluster(i, job="", address="a:1") for i in range(2))
    other = dataclasses.replace(one, addresses=("a:1", "b:1"))
    assert facts_of(one) == facts_of(same)
    assert facts_of(one).job != facts_of(other).job
    assert facts_of(one).version == keras_dist.__version__
