"""A fourth backend, written with the names of `keras_dist.plugins` only.

Its replicas take turns on one device, on PyTorch tensors, whichever devices
they are said to be on. It compiles no functions and knows no other workers.
With the environment variable KERAS_DIST_FOURTH set, the conformance tests run
on it in place of the installed one.
"""

import keras
import torch
from keras import ops
from keras import tree

from keras_dist.plugins import Differentiates
from keras_dist.plugins import LockstepThreads
from keras_dist.plugins import Owners
from keras_dist.plugins import Replica
from keras_dist.plugins import Round
from keras_dist.plugins import RowShard
from keras_dist.plugins import StepRunner
from keras_dist.plugins import get_backend
from keras_dist.plugins import inherit_thread_state
from keras_dist.plugins import outside_replicas
from keras_dist.plugins import parse_device
from keras_dist.plugins import thread_state
from keras_dist.testing import MemoryBackend
from keras_dist.testing import MemoryExecutor
from keras_dist.testing import MemoryStorage


class FourthReplica(Replica):
    """A replica that differentiates leaves of autograd of its own."""

    def __init__(self, index, share, round_, storage):
        super().__init__(index, share)
        self.round = round_
        self.storage = storage

    def rendezvous(self, what, fn, value):
        def hold(values):
            with outside_replicas(), torch.no_grad():
                return fn(values)

        return self.round.rendezvous(self.index, what, hold, value)

    def read(self, variable):
        value = self.storage(variable).read(self.index)
        return None if value is None else self.leaf(variable, value)

    def hold(self, variable, value):
        return self.leaf(variable, value.detach().clone())

    @staticmethod
    def leaf(variable, value):
        return value.requires_grad_(variable.trainable)


class FourthStorage(MemoryStorage):
    """The storage of a variable that every replica reads where it is."""

    def read(self, index):
        value = super().read(index)
        return None if value is None else value.detach()


class FourthCentralStorage(FourthStorage):
    """The storage of a variable of which there is a single copy."""

    kind = "central"

    def __init__(self, variable, executor):
        super().__init__(variable, executor)
        self.owners = executor.owners

    @property
    def devices(self):
        return (self.owners.of(self.variable),)


class FourthExecutor(MemoryExecutor):
    """Leaves variables where Keras makes them."""

    def creation_scope(self):
        return keras.device("cpu")

    def default_device(self):
        return ops.convert_to_tensor(0.0).device

    def put(self, value, device):
        return ops.convert_to_tensor(value)

    def mirror(self, value):
        return ops.copy(value)

    def storage(self, variable):
        return FourthStorage(variable, self)

    def snapshot(self, value, index=0):
        if not isinstance(value, torch.Tensor):
            return value
        return value if value.grad_fn is not None else value.clone()

    def is_live(self, value):
        return isinstance(value, torch.nn.Parameter)


class FourthReplicas(FourthExecutor, StepRunner):
    """Runs replicas in turns."""

    def __init__(self, plan):
        super().__init__(plan)
        self.pool = LockstepThreads(self.capture)

    @property
    def replicas(self):
        return self

    @staticmethod
    def capture():
        state = thread_state()
        return lambda: inherit_thread_state(state)

    def play(self, fns, shares):
        """Calls each function with a replica that has its share."""
        round_ = Round(len(fns))

        def turn(index):
            replica = FourthReplica(index, shares[index], round_, self.storage)
            return lambda: fns[index](replica)

        return self.pool.run(round_, [turn(index) for index in range(len(fns))])

    def call(self, fn):
        count = self.plan.num_replicas
        return self.play([fn] * count, [RowShard(1, 1)] * count)

    def run(self, fn, batch, is_whole=False):
        rows = self.rows_in_fit(batch)
        total = rows[-1].stop
        if is_whole:
            rows = [range(total)]
        rows = [each for each in rows if each]
        fns = [
            lambda replica, own=each: fn(replica, cut(batch, own))
            for each in rows
        ]
        return self.play(fns, [RowShard(len(each), total) for each in rows])

    def sum_gradients(self, replica, gradients, weights, variables):
        return [
            total(
                weight * gradient
                for weight, gradient in zip(weights, each, strict=True)
                if gradient is not None
            )
            for each in zip(*gradients, strict=True)
        ]


class FourthCentral(FourthReplicas):
    """Runs replicas in turns on single copies of variables."""

    def __init__(self, plan):
        super().__init__(plan)
        self.owners = Owners(plan.variable_devices)

    def storage(self, variable):
        return FourthCentralStorage(variable, self)

    def keep_together(self, variable, reference):
        self.owners.keep_together(variable, reference)


class FourthBackend(MemoryBackend, Differentiates):
    """Four CPUs in name; the installed backend differentiates."""

    def __init__(self):
        super().__init__([parse_device(f"cpu:{index}") for index in range(4)])
        self.framework = get_backend()

    def executor(self, plan):
        kind = FourthExecutor if plan.is_one_device else FourthReplicas
        return kind(plan)

    def central_executor(self, plan):
        return FourthCentral(plan)

    def differentiate(self, fn, variables, tensors):
        return self.framework.differentiate(fn, variables, tensors)


def cut(batch, rows):
    """The rows of a nest of arrays; numbers are for all replicas."""

    def own(leaf):
        is_array = len(getattr(leaf, "shape", ())) > 0
        return leaf[rows.start : rows.stop] if is_array else leaf

    return tree.map_structure(own, batch)


def total(gradients):
    """The sum of gradients; `None` if there is none."""
    first, *others = [*gradients] or [None]
    for other in others:
        first = first + other
    return first
