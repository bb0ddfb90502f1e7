"""Replica threads run one at a time, in order, and never hang."""

import gc
import threading

import pytest

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


def test_one_runs_at_a_time_in_order():
    seen = []

    def replica(index):
        def fn(meet):
            for phase in range(3):
                seen.append((phase, index))
                assert meet(index, hold=list) == [0, 1, 2]
            return threading.current_thread()

        return fn

    threads = run(*map(replica, range(3)))
    assert seen == sorted(seen)
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
                raise KeyboardInterrupt("mine")
            meet(0)
            reached.append(index)

        return fn

    with pytest.raises(KeyboardInterrupt, match="mine"):
        run(*map(replica, range(3)))
    assert not reached


def test_the_failure_of_a_rendezvous_reaches_the_caller():
    def hold(values):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(*[lambda meet: meet(0, hold=hold)] * 3)


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
