"""Replica threads: one at a time, in order, and never a hang."""

import gc
import threading

import pytest

from keras_dist.errors import ReplicaDivergenceError
from keras_dist.plugin.threads import LockstepThreads
from keras_dist.plugin.threads import Round


def run(*fns):
    """Runs `fns`, each of which gets a function that meets the others."""
    round_ = Round(len(fns))

    def bound(index, fn):
        def meet(value, what="a sum", hold=sum):
            return round_.rendezvous(index, what, hold, value)

        return lambda: fn(meet)

    pool = LockstepThreads(lambda: lambda: None)
    return pool.run(round_, [bound(i, fn) for i, fn in enumerate(fns)])


@pytest.mark.parametrize("num_replicas", [1, 2, 5])
def test_rendezvous_give_every_replica_the_result(num_replicas):
    def replica(meet):
        return meet(1), meet(10), meet(100)

    expected = tuple(num_replicas * value for value in (1, 10, 100))
    assert run(*[replica] * num_replicas) == [expected] * num_replicas


def test_values_arrive_in_replica_order():
    def replica(index):
        return lambda meet: meet(index, hold=list)

    assert run(*map(replica, range(4))) == [[0, 1, 2, 3]] * 4


def test_one_runs_at_a_time_in_order():
    seen = []

    def replica(index):
        def fn(meet):
            for phase in range(3):
                seen.append((phase, index))
                meet(0)

        return fn

    run(*map(replica, range(3)))
    assert seen == sorted(seen)


def test_replica_0_is_the_callers_thread():
    threads = run(*[lambda meet: threading.current_thread()] * 3)
    assert threads[0] is threading.current_thread()
    assert len(set(threads)) == 3


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("rendezvous_before", [0, 1])
def test_the_failure_of_one_ends_all(failing, rendezvous_before):
    reached = []

    def replica(index):
        def fn(meet):
            for _ in range(rendezvous_before):
                meet(0)
            if index == failing:
                raise KeyError("mine")
            meet(0)
            reached.append(index)

        return fn

    with pytest.raises(KeyError, match="mine") as error:
        run(*map(replica, range(3)))
    assert f"replica {failing} of 3" in error.value.__notes__[0]
    assert not reached


def test_the_failure_of_a_rendezvous_reaches_the_caller():
    def hold(values):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(*[lambda meet: meet(0, hold=hold)] * 3)


def test_unequal_numbers_of_rendezvous_name_who_waits_for_what():
    def meets_twice(meet):
        meet(0)
        meet(0, what="metric 'accuracy'")

    with pytest.raises(ReplicaDivergenceError) as error:
        run(meets_twice, lambda meet: meet(0), meets_twice)
    message = str(error.value)
    assert "replica 0 at metric 'accuracy'" in message
    assert "replica 1 had already ended" in message


def test_different_rendezvous_are_named():
    with pytest.raises(ReplicaDivergenceError, match="at loss.*at metric"):
        run(
            lambda meet: meet(0, what="loss 'mse'"),
            lambda meet: meet(0, what="metric 'mae'"),
        )


def test_an_interrupt_of_the_caller_unwinds_the_others():
    unwound = []

    def other(meet):
        try:
            meet(0)
            meet(0)
        except BaseException as error:
            unwound.append(type(error).__name__)
            raise

    def interrupted(meet):
        meet(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupted, other, other)
    assert unwound == ["_Aborted", "_Aborted"]


def test_threads_are_kept_between_rounds_and_end_with_the_pool():
    pool = LockstepThreads(lambda: lambda: None)
    fns = [threading.get_ident] * 3
    before = threading.active_count()
    assert pool.run(Round(3), fns) == pool.run(Round(3), fns)
    workers = [
        t for t in threading.enumerate() if t.name.startswith("keras_dist-")
    ]
    assert threading.active_count() == before + 2
    del pool
    gc.collect()
    for worker in workers[-2:]:
        worker.join(timeout=10)
        assert not worker.is_alive()
