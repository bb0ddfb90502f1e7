"""What workers run in tests of parts of variables, also on PyTorch alone."""

import contextlib
import gc
import importlib
import time
from unittest import mock

import keras
import numpy as np

import keras_dist
from keras_dist.errors import ClusterError
from parity import harness
from sharded.helpers import X
from sharded.helpers import Y
from sharded.helpers import network
from workers.jobs import attempted
from workers.jobs import in_cluster

STATE = "optimizer_state"
SECONDS_TO_FREE = 20


def passes(module, name, *args):
    """Runs a test of one process, on this cluster in place of its devices."""
    in_cluster(STATE)
    mirrored = keras_dist.MultiWorkerMirroredStrategy()
    with mock.patch.multiple(
        harness, strategy=lambda num_replicas: mirrored, scope=_scope
    ):
        getattr(importlib.import_module(module), name)(*args)


def _scope(num_replicas, make=None):
    """In place of plain Keras, of which each worker would train a model."""
    if num_replicas is None:
        return keras_dist.OneDeviceStrategy("cpu:0").scope()
    return make(num_replicas).scope()


def trains_what_is_not_contiguous():
    outcomes = []
    for count in (None, 2):
        with harness.scope(count, harness.sharded):
            model = network()
            for variable in model.trainable_variables:
                data = variable.value.data
                if data.ndim == 2:
                    variable.value.data = data.t().contiguous().t()
            model.compile("adam", "mse")
        model.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
        outcomes.append(model.get_weights())
    for plain, own in zip(*outcomes, strict=True):
        np.testing.assert_allclose(own, plain, rtol=2e-5, atol=1e-6)


def one_layer(strategy, optimizer, units=5, constraint=None):
    with strategy.scope():
        dense = keras.layers.Dense(units, kernel_constraint=constraint)
        model = keras.Sequential([dense])
        model.compile(optimizer, "mse")
    return model


def refused_on_one_gpu():
    """Errors of updates, were all workers on one GPU."""
    strategy = in_cluster(STATE)
    x, y = np.ones((6, 4), "float32"), np.ones((6, 3), "float32")
    found = []
    for optimizer, constraint in (
        ("adam", None),
        (keras.optimizers.Lamb(), None),
        ("adam", keras.constraints.NonNeg()),
    ):
        model = one_layer(strategy, optimizer, 3, constraint)
        with mock.patch.object(
            strategy.executor.workers, "may_share_tensors"
        ) as may_share:
            may_share.return_value = False
            try:
                model.train_on_batch(x, y)
                found.append("")
            except ClusterError as error:
                found.append(str(error))
    return found


class Raises(keras.constraints.Constraint):
    """Fails in the middle of an update, if it is told to."""

    fails = False

    def __call__(self, w):
        if self.fails:
            raise ArithmeticError("in the middle")
        return w


def weights_after_a_failed_update():
    """The weights after an update that failed, and after the next one."""
    constraint = Raises()
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    model = one_layer(in_cluster(STATE), sgd, constraint=constraint)
    x, y = np.ones((6, 4), "float32"), np.ones((6, 5), "float32")
    model.train_on_batch(x, y)
    constraint.fails, found = True, []
    with contextlib.suppress(ArithmeticError):
        model.train_on_batch(x, y)
        raise AssertionError("it has not failed")
    found.append(model.get_weights())
    constraint.fails = False
    model.train_on_batch(x, y)
    return [*found, model.get_weights()]


def refused_outside_of_steps():
    """Errors of updates with gradients that can't be right."""
    strategy = in_cluster(STATE)
    index = strategy.plan.cluster.index
    with strategy.scope():
        variable = keras.Variable(np.zeros((6, 8), "float32"), name="v")
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build([variable])
    found = [
        attempted(optimizer.apply, [gradient], [variable])
        for gradient in (
            keras.ops.ones((12, 8)),
            np.ones((6, 8)),
            keras.ops.full((6, 8), 1.0 + index),
        )
    ]
    optimizer.apply([keras.ops.ones((6, 8))], [variable])
    return [*found, np.unique(variable.numpy()).tolist()]


class Flattens(keras.optimizers.SGD):
    """Does what `DTensor` can't do with parts of different sizes."""

    def update_step(self, gradient, variable, learning_rate):
        largest = keras.ops.max(keras.ops.reshape(gradient, (-1,)))
        self.assign_sub(variable, gradient / largest)


def beyond_dtensor():
    """The error of such an optimizer; and whether a user's own
    `implicit_replication` is as it was after a step of another one."""
    from torch.distributed.tensor.experimental import implicit_replication

    from keras_dist_torch.dtensor_internals import dispatcher

    strategy = in_cluster(STATE)
    x, y = np.ones((6, 7), "float32"), np.ones((6, 5), "float32")
    error = attempted(one_layer(strategy, Flattens(0.1)).train_on_batch, x, y)
    model = one_layer(strategy, "adam")
    with implicit_replication():
        model.train_on_batch(x, y)
        is_on = dispatcher._allow_implicit_replication
    model.train_on_batch(x, y)
    return error, is_on, dispatcher._allow_implicit_replication


def memory_of_tensors():
    """The bytes, type and shape of each memory that tensors have, by size."""
    import torch

    gc.collect()
    found = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and not each.is_meta:
            local = getattr(each, "_local_tensor", each)
            storage = local.untyped_storage()
            kind, shape = type(each).__name__, tuple(local.shape)
            found[storage._cdata] = storage.nbytes(), kind, shape
    return sorted(found.values(), reverse=True)


def bytes_of_tensors():
    """Bytes of the memory of all tensors that are alive."""
    return sum(size for size, *_ in memory_of_tensors())


def bytes_once_freed(limit):
    """Does `bytes_of_tensors` when it is below a limit, or after some time: a
    thread of gloo may hold what it has sent for a while."""
    deadline = time.monotonic() + SECONDS_TO_FREE
    while (size := bytes_of_tensors()) > limit:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return size


def bytes_of_slots(limits):
    """What a model with Adam adds to the bytes of all tensors, with its slots
    in parts, and whole; then what is largest with parts."""
    found = []
    strategies = in_cluster(STATE), keras_dist.MultiWorkerMirroredStrategy()
    for strategy, limit in zip(strategies, limits, strict=True):
        before = bytes_of_tensors()
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((1000,)), keras.layers.Dense(1000)]
            )
            model.compile("adam", "mse")
        x = np.zeros((8, 1000), "float32")
        model.fit(x, x, batch_size=4, verbose=0)
        for variable in model.trainable_variables:
            variable.value.grad = None
        model.optimizer.variables[2].numpy()
        found.append(bytes_once_freed(before + limit) - before)
        if len(found) == 1:
            largest = memory_of_tensors()[:12]
        del x, model, variable
    return *found, largest


def collectives(optimizer_options, initial_scale=None, least_elements=1):
    """The collectives of one step, by kind."""
    from torch.distributed.tensor.debug import CommDebugMode

    strategy = in_cluster(STATE, least_elements)
    optimizer = keras.optimizers.Adam(**optimizer_options)
    if initial_scale:
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=initial_scale
        )
    with strategy.scope():
        model = network()
        model.compile(optimizer, "mse")
    x, y = np.ones((6, 4), "float32"), np.ones((6, 3), "float32")
    model.train_on_batch(x, y)
    workers = strategy.executor.workers
    found = {}
    for name in ("scatter_sum", "gather_flat", "start_sum"):
        setattr(workers, name, _counted(getattr(workers, name), name, found))
    exchange = workers.exchange

    def counting(call, *args):
        found.setdefault("exchange", []).append(call.text)
        return exchange(call, *args)

    workers.exchange = counting
    with CommDebugMode() as of_tensors:
        model.train_on_batch(x, y)
    found["by DTensor"] = of_tensors.get_total_counts()
    return found


def _counted(method, name, found):
    def counting(*args):
        found.setdefault(name, []).append(args[-1].numel())
        return method(*args)

    return counting
