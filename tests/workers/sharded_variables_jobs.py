"""What workers run in `test_sharded_variables.py`."""

import gc
import time
from unittest import mock

import keras
import numpy as np
import torch

import keras_dist
from keras_dist.core.plan import num_bytes
from keras_dist.errors import UnsupportedModelError
from keras_dist_torch import parts
from parity import cases
from parity import harness
from workers import sharded_jobs
from workers import sharded_models
from workers import sharded_programs
from workers.jobs import attempted

VARIABLES = "variables"
SECONDS_TO_FREE = 20


def in_cluster(least_elements=1, what=VARIABLES):
    """The strategy that this worker trains under from now on.

    Args:
        least_elements: Integer, how many elements make a variable large.
        what: String, what is sharded.
    """
    strategy = sharded_jobs.in_cluster(what)
    parts.LEAST_ELEMENTS = least_elements
    return strategy


def train_case(name):
    """The outcome of a case of the parity table."""
    count = in_cluster().num_replicas_in_sync
    (case,) = (case for case in cases.CASES if case.name == name)
    return harness.train(case, count, harness.strategy)


def run_program(name, argument, what):
    """What a program computes, with small variables that are not in parts."""
    strategy = in_cluster(least_elements=64, what=what)
    return sharded_programs.PROGRAMS[name](strategy.scope, argument)


def save_all(folder):
    """Trains and saves in each way there is; what the state was then."""
    in_cluster()
    return sharded_jobs.save_all(VARIABLES, folder)


def load_all(folder):
    """Loads what `save_all` has saved, and goes on."""
    in_cluster()
    return sharded_jobs.load_all(VARIABLES, folder)


def wide_model():
    """A strategy, and a trained model whose size is in three layers."""
    strategy = in_cluster()
    model = sharded_models.compiled(sharded_models.wide, strategy.scope)
    sharded_models.all_of(model, sharded_models.NUMBERS, sharded_models.CLASSES)
    return strategy, model


def bytes_kept(_):
    """For each variable, bytes here and in all; then what is more than these in
    the bytes of all tensors."""
    before = bytes_of_tensors()
    strategy, model = wide_model()
    storage = strategy.executor.storage
    kept = [
        (tuple(variable.shape), list(storage(variable).bytes_kept().values()))
        for variable in [*model.variables, *model.optimizer.variables]
    ]
    expected = before + sum(own for shape, (own,) in kept if len(shape))
    return kept, bytes_once_freed(expected + 20_000) - expected


def frozen_bytes_kept(_):
    """By path, bytes here and in all of a model's weights, not all trained."""
    strategy = in_cluster(least_elements=100)
    with strategy.scope():
        made = sharded_models.frozen()
    model = sharded_models.frozen()
    strategy.distribute(model)
    found = []
    for each in made, model:
        each.compile("adam", "mse")
        each.predict(sharded_models.NUMBERS, verbose=0)
        found.append(
            {
                variable.path.partition("/")[2]: (
                    list(
                        strategy.executor.storage(variable)
                        .bytes_kept()
                        .values()
                    ),
                    num_bytes(variable),
                )
                for variable in each.variables
            }
        )
    return found


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


def memory_of_tensors():
    """The bytes, type and shape of each memory that tensors have, by size."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and not each.is_meta:
            local = getattr(each, "_local_tensor", each)
            storage = local.untyped_storage()
            kind, shape = type(each).__name__, tuple(local.shape)
            found[storage._cdata] = storage.nbytes(), kind, shape
    return sorted(found.values(), reverse=True)


def collectives(_):
    """How many collectives a step has, by name: one of `fit`, and one of a
    replica function."""
    # PyTorch can't import this before the modules of FSDP.
    from torch.distributed.tensor.debug import CommDebugMode

    strategy, model = wide_model()
    x, y = sharded_models.NUMBERS, sharded_models.CLASSES

    def step():
        def loss():
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x))
            return keras_dist.compute_average_loss(losses, 2 * len(y))

        gradients = keras_dist.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    found = []
    for run in lambda: model.train_on_batch(x, y), lambda: strategy.run(step):
        sent = []
        with CommDebugMode() as counting, _noted(strategy, sent):
            run()
        counts = {
            str(name).rpartition(".")[2]: count
            for name, count in counting.get_comm_counts().items()
        }
        found.append({**counts, "all_to_all": len(sent)})
    return found


def _noted(strategy, sent):
    """Returns a context manager that notes what goes to all workers."""
    workers = strategy.executor.workers
    send = workers._all_to_all

    def noting(rows):
        sent.append(rows)
        return send(rows)

    return mock.patch.object(workers, "_all_to_all", noting)


def bytes_gathered(_):
    """Bytes that a step gathers where layers compute in bfloat16."""
    # PyTorch can't import this before the modules of FSDP.
    from torch.utils._python_dispatch import TorchDispatchMode

    class Gathers(TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "allgather_base" in func.__name__:
                self.num_bytes += args[0].nbytes
            return func(*args, **(kwargs or {}))

    with in_cluster().scope():
        model = sharded_models.wide(dtype="mixed_bfloat16")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
    data = sharded_models.NUMBERS, sharded_models.CLASSES
    model.train_on_batch(*data)
    with Gathers() as gathers:
        model.train_on_batch(*data)
    return gathers.num_bytes, model.count_params()


class Derives(sharded_models.Parts):
    """Asks for gradients in a way that FSDP does not see."""

    def train_step(self, data):
        loss = keras.ops.mean(self.encoder(data[0]))
        torch.autograd.grad(loss, [self.encoder.kernel.value])


class DerivesTwice(sharded_models.Parts):
    """Asks for gradients that can be differentiated."""

    def train_step(self, data):
        loss = keras.ops.mean(self.encoder(data[0]))
        loss.backward(create_graph=True)


class DerivesInTwoWays(sharded_models.Parts):
    """Asks for gradients that count differently."""

    def train_step(self, data):
        def loss():
            return keras.ops.mean(self.encoder(data[0]))

        loss().backward()
        keras_dist.gradient(loss, self.encoder.kernel)


def refused(_):
    """What is refused, as texts; nothing changes meanwhile."""
    strategy, model = wide_model()
    variables = model.trainable_variables
    before = [variable.numpy() for variable in variables]
    found = {
        "apply": attempted(
            model.optimizer.apply,
            [keras.ops.ones(variable.shape) for variable in variables],
            variables,
        ),
    }
    for make in Derives, DerivesTwice, DerivesInTwoWays:
        own = sharded_models.compiled(make, strategy.scope)
        found[make.__name__] = attempted(
            own.train_on_batch,
            sharded_models.NUMBERS,
            sharded_models.CLASSES,
        )
    for name, fn in in_functions(model).items():
        found[name] = attempted(strategy.run, fn)
    for value, variable in zip(before, variables, strict=True):
        np.testing.assert_array_equal(value, variable.numpy())
    return found


def in_functions(model):
    """Replica functions that use gradients in ways that are refused."""
    x = keras.ops.convert_to_tensor(sharded_models.NUMBERS)
    variables = model.trainable_variables

    def loss():
        return keras.ops.mean(model(x))

    def gradients():
        return keras_dist.gradient(loss, variables)

    def nested():
        return keras.ops.sum(keras_dist.gradient(loss, variables)[1])

    def of_moving():
        model.layers[0].trainable = False
        try:
            keras_dist.gradient(loss, variables)
        finally:
            model.layers[0].trainable = True

    def raises():
        loss()
        raise UnsupportedModelError("mine")

    return {
        "norm": lambda: keras.ops.norm(gradients()[0]),
        "doubled": lambda: 2.0 * gradients()[0],
        "numpy": lambda: gradients()[0].numpy(),
        "reduced": lambda: keras_dist.get_replica_context().all_reduce(
            "SUM", gradients()[0]
        ),
        "backward": lambda: loss().backward(),
        "nested": lambda: keras_dist.gradient(nested, variables),
        "frozen": of_moving,
        "raised": raises,
    }


def shown(_):
    """What a user sees of a model, and what Keras sees of workers."""
    strategy, model = wide_model()
    report = strategy.verify(
        model, sharded_models.NUMBERS, sharded_models.CLASSES
    )
    return {
        "classes": {type(each).__name__ for each in model._flatten_layers()},
        "config": str(model.get_config()),
        "repr": repr(model.layers[0].kernel),
        "is_same": bool(report.is_same)
        if hasattr(report, "is_same")
        else str(report),
        "has_group": torch.distributed.is_initialized(),
    }


def devices_refused():
    """The error of a worker with several devices, as a text."""
    return attempted(
        lambda: keras_dist.MultiWorkerMirroredStrategy(variables="sharded")
    )
