"""The sum over replicas that a backend need not write has right gradients."""

import keras
import pytest
from keras import ops

from keras_dist.plugins import LockstepThreads
from keras_dist.plugins import Replica
from keras_dist.plugins import Round
from keras_dist.plugins import RowShard
from keras_dist.plugins import get_backend
from keras_dist.plugins import inherit_thread_state
from keras_dist.plugins import outside_replicas
from keras_dist.plugins import thread_state

pytestmark = pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="JAX traces custom gradients; its replicas have their own sum",
)


class Simple(Replica):
    """A replica that defines what it has to."""

    def __init__(self, index, share, round_):
        super().__init__(index, share)
        self.round = round_

    def rendezvous(self, what, fn, value):
        def hold(values):
            with outside_replicas():
                return fn(values)

        return self.round.rendezvous(self.index, what, hold, value)

    def read(self, variable):
        return None

    def hold(self, variable, value):
        return value


def on_replicas(fn, rows):
    """The results of `fn(replica)` on replicas with so many rows."""
    round_ = Round(len(rows))
    state = thread_state()
    pool = LockstepThreads(lambda: lambda: inherit_thread_state(state))

    def turn(index):
        replica = Simple(index, RowShard(rows[index], sum(rows)), round_)
        return lambda: fn(replica)

    return pool.run(round_, [turn(index) for index in range(len(rows))])


@pytest.mark.parametrize("is_known", [False, True])
def test_sum_and_gradients_are_weighted(is_known):
    rows, factors = [1, 3], [2.0, 5.0]

    def on_replica(replica):
        own = ops.convert_to_tensor([1.0 + replica.index, 10.0])
        total = ops.convert_to_tensor([3.0, 20.0]) if is_known else None

        def loss_fn(own):
            summed = replica.all_sum("the test", own, total)
            return factors[replica.index] * ops.sum(summed), summed

        _, summed, (gradient,) = get_backend().differentiate(loss_fn, [], [own])
        return ops.convert_to_numpy(summed), ops.convert_to_numpy(gradient)

    results = on_replicas(on_replica, rows)
    weighted = sum(r / 4 * f for r, f in zip(rows, factors, strict=True))
    for (summed, gradient), own in zip(results, rows, strict=True):
        assert summed.tolist() == [3.0, 20.0]
        expected = weighted / (own / 4)
        assert gradient.tolist() == pytest.approx([expected] * 2)


def test_shapes_have_to_be_equal():
    with pytest.raises(ValueError, match="different shapes"):
        on_replicas(lambda r: r.all_sum("the test", ops.ones(r.id + 1)), [1, 1])
