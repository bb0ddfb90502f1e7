"""Variables of the suite: ours, and beside them the original's."""

import contextlib

import keras
import numpy as np
import pytest

from conformance.helpers import is_distributed
from conformance.helpers import per_replica
from conformance.helpers import raw
from conformance.helpers import replica_id
from conformance.helpers import to_numpy
from keras_dist.replica.variables import CentralVariable

AGGREGATIONS = ("none", "sum", "mean", "only_first_replica")
SYNCHRONIZATIONS = ("on_write", "on_read")


def variable(api, strategy, initial=0.0, **kwargs):
    """A variable made in the strategy's scope.

    The original's is the framework's own variable behind Keras' one. Keras
    computes `assign_add(x)` as `assign(self + x)`, which is another thing for
    `aggregation="sum"`, so the contract was measured without it.
    """
    with strategy.scope():
        made = keras.Variable(initial, **kwargs)
    return raw(api, made)


def copies(of):
    """What each copy of a variable holds, as lists and numbers of Python.

    One copy that all replicas read is there once for each of them.
    """
    if isinstance(of, CentralVariable):
        count = of.distribute_strategy.num_replicas_in_sync
        return [np.asarray(of.numpy()).tolist()] * count
    if not is_distributed(of) and is_distributed(getattr(of, "value", None)):
        of = of.value
    components = of.values if is_distributed(of) else (of,)
    return [np.asarray(each.numpy()).tolist() for each in components]


def current(of):
    """A variable's value here, read by an operation."""
    return keras.ops.add(of, 0)


def read(of):
    """A variable's value here, as a list or a number of Python."""
    return to_numpy(current(of)).tolist()


def in_replicas(api, strategy, fn):
    """Calls `fn` with each replica's number as a float tensor, in `run`."""

    def step():
        fn(keras.ops.convert_to_tensor(float(replica_id(api))))

    strategy.run(step)


def parts(strategy, values):
    """A value with those components, of the first one if that is all."""
    return per_replica(
        strategy, lambda r: keras.ops.convert_to_tensor(values[r])
    )


def shares(strategy, array):
    """The rows of an array, spread over the replicas in order."""
    return parts(strategy, np.array_split(array, strategy.num_replicas_in_sync))


@contextlib.contextmanager
def refuses(error, of):
    """Expects an error, and each copy of a variable as it was."""
    before = copies(of)
    with pytest.raises(error):
        yield
    assert copies(of) == before
