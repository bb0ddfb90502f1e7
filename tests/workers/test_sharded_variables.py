"""PyTorch: workers that each keep a part of each variable train as one."""

import contextlib
import math
from unittest import mock

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.core.plan import num_bytes
from keras_dist.errors import DeviceError
from keras_dist.errors import UnsupportedModelError
from parity.harness import assert_same
from parity.harness import sharded_variables
from workers import clusters
from workers import sharded_models
from workers.clusters import on_workers
from workers.jobs import attempted
from workers.jobs import in_cluster
from workers.sharded_jobs import bytes_of_tensors
from workers.sharded_jobs import bytes_once_freed
from workers.sharded_models import CLASSES
from workers.sharded_models import NUMBERS
from workers.sharded_models import OPTIMIZERS
from workers.sharded_programs import PROGRAMS

pytestmark = pytest.mark.only_on(
    "torch", reason="tests/parity/test_sharded.py has JAX."
)
# By program, its argument in place of an optimizer's name.
ARGUMENTS = {"fail_and_go_on": ["forward", "backward"]}
# Programs that run with the optimizer's state in parts, too.
OF_STATE = [
    *("adopted", "adversaries", "constrained", "half_toggled"),
    *("optimizer_each", "own_loop", "own_loop_of_two"),
    "own_step_by_functions",
]
# Sums of bfloat16 are in another order.
TOLERANCES = {"half": 0.06, "half_toggled": 0.06}


def _programs():
    for name in PROGRAMS:
        for argument in ARGUMENTS.get(name, ["adam"]):
            yield name, argument, "variables"
    yield "adversaries", "sgd", "variables"
    for optimizer in OPTIMIZERS:
        if optimizer != "adam":
            yield "train_transformer", optimizer, "variables"
        # Of RMSprop, the first steps make much of what rounding left.
        if optimizer != "rmsprop":
            yield "train_transformer", optimizer, "optimizer_state"
    for optimizer in ("adamw", "sgd"):
        yield "train_convolutions", optimizer, "variables"
    for name in OF_STATE:
        yield name, "adam", "optimizer_state"


def run_program(name, argument, what):
    """What a program computes, with small variables that are not in parts."""
    strategy = in_cluster(what, least_elements=64)
    return PROGRAMS[name](strategy.scope, argument)


@pytest.mark.parametrize(("name", "argument", "what"), [*_programs()])
def test_a_program_computes_what_it_does_on_one_device(name, argument, what):
    expected = PROGRAMS[name](contextlib.nullcontext, argument)
    tolerance = TOLERANCES.get(name, 2e-4)
    for outcome in clusters.run(
        run_program, (name, argument, what), workers=2, devices=1, timeout=300
    ):
        assert_same(outcome, expected, tolerance, atol=tolerance / 10)


def wide_model():
    """A strategy, and a trained model whose size is in three layers."""
    strategy = in_cluster("variables")
    model = sharded_models.compiled(sharded_models.wide, strategy.scope)
    sharded_models.all_of(model, NUMBERS, CLASSES)
    return strategy, model


def bytes_kept(strategy, variable):
    return list(strategy.executor.storage(variable).bytes_kept().values())


@pytest.mark.parametrize("shape", [(2, 1), (3, 1)])
@on_workers()
def test_each_worker_keeps_its_part(shape):
    before = bytes_of_tensors()
    strategy, model = wide_model()
    variables = [*model.variables, *model.optimizer.variables]
    variables = [v for v in variables if len(v.shape)]
    owns = [bytes_kept(strategy, v)[0] for v in variables]
    wholes = sum(4 * math.prod(v.shape) for v in variables)
    # The first axis may not divide equally.
    assert sum(owns) <= 1.02 * wholes / shape[0]
    # No whole tensor is left, nor a gradient.
    limit = before + sum(owns) + 20_000
    assert bytes_once_freed(limit) <= limit


@on_workers()
def test_each_worker_keeps_its_part_of_weights_that_are_not_trained():
    strategy = in_cluster("variables", least_elements=100)
    with strategy.scope():
        made = sharded_models.frozen()
    model = sharded_models.frozen()
    strategy.distribute(model)
    for each in made, model:
        each.compile("adam", "mse")
        each.predict(NUMBERS, verbose=0)
        sharded = set()
        for variable in each.variables:
            (own,), whole = bytes_kept(strategy, variable), num_bytes(variable)
            assert own in (whole, whole // 2)
            if own < whole:
                sharded.add(variable.path.partition("/")[2])
        assert sharded == {
            *("first/kernel", "tables/fixed", "tables/moving"),
            "second/kernel",
        }


def of_functions(strategy, model):
    """Calls a replica function with one step."""

    def step():
        def loss():
            losses = keras.losses.sparse_categorical_crossentropy(
                CLASSES, model(NUMBERS)
            )
            return keras_dist.compute_average_loss(losses, 2 * len(CLASSES))

        gradients = keras_dist.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)

    strategy.run(step)


@on_workers()
def test_each_layer_is_gathered_once_for_each_pass():
    # PyTorch can't import this before the modules of FSDP.
    from torch.distributed.tensor.debug import CommDebugMode

    strategy, model = wide_model()
    workers = strategy.executor.workers
    send, sent = workers._all_to_all, []

    def noting(rows):
        sent.append(rows)
        return send(rows)

    for run in (
        lambda: model.train_on_batch(NUMBERS, CLASSES),
        lambda: of_functions(strategy, model),
    ):
        sent.clear()
        with (
            CommDebugMode() as counting,
            mock.patch.object(workers, "_all_to_all", noting),
        ):
            run()
        counts = {
            str(name).rpartition(".")[2]: count
            for name, count in counting.get_comm_counts().items()
        }
        assert (counts, len(sent)) == ({"_allgather_base_": 8}, 4)


@on_workers()
def test_gathers_are_in_the_dtype_that_layers_compute_in():
    # PyTorch can't import this before the modules of FSDP.
    from torch.utils._python_dispatch import TorchDispatchMode

    class Gathers(TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "allgather_base" in func.__name__:
                self.num_bytes += args[0].nbytes
            return func(*args, **(kwargs or {}))

    with in_cluster("variables").scope():
        model = sharded_models.wide(dtype="mixed_bfloat16")
        model.compile("sgd", sharded_models.cross_entropy())
    model.train_on_batch(NUMBERS, CLASSES)
    with Gathers() as gathers:
        model.train_on_batch(NUMBERS, CLASSES)
    # In both passes.
    assert gathers.num_bytes == 2 * 2 * model.count_params()


@on_workers()
def test_what_a_user_sees():
    import torch

    strategy, model = wide_model()
    assert strategy.verify(model, NUMBERS, CLASSES).same
    assert {type(each).__name__ for each in model._flatten_layers()} == {
        *("Sequential", "InputLayer", "Dense"),
    }
    assert "FSDP" not in str(model.get_config())
    assert "in parts" in repr(model.layers[0].kernel)
    assert not torch.distributed.is_initialized()


class Derives(sharded_models.Parts):
    """Asks for gradients in a way that FSDP does not see."""

    def train_step(self, data):
        import torch

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


def in_functions(model):
    """Replica functions that use gradients in ways that are refused."""
    x = keras.ops.convert_to_tensor(NUMBERS)
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


REFUSED = {
    **dict.fromkeys(
        ("norm", "doubled", "numpy", "reduced"), "It is a sum over workers"
    ),
    "backward": "`keras_dist.value_and_grad`",
    "nested": "a gradient of a gradient",
    "frozen": "which is not trainable",
    "raised": "mine",
    "apply": "outside of `fit`",
    "Derives": "torch.autograd.grad was called",
    "DerivesTwice": "`create_graph`",
    "DerivesInTwoWays": "in two ways",
}


@on_workers()
def test_what_can_not_be_right_is_refused():
    strategy, model = wide_model()
    variables = model.trainable_variables
    before = [variable.numpy() for variable in variables]
    ones = [keras.ops.ones(variable.shape) for variable in variables]
    found = {"apply": attempted(model.optimizer.apply, ones, variables)}
    for make in Derives, DerivesTwice, DerivesInTwoWays:
        own = sharded_models.compiled(make, strategy.scope)
        found[make.__name__] = attempted(own.train_on_batch, NUMBERS, CLASSES)
    for name, fn in in_functions(model).items():
        found[name] = attempted(strategy.run, fn)
    assert found.keys() == REFUSED.keys()
    for name, text in found.items():
        assert "UnsupportedModelError" in text
        assert REFUSED[name] in text, (name, text)
    for value, variable in zip(before, variables, strict=True):
        np.testing.assert_array_equal(value, variable.numpy())


def made_with_devices():
    return attempted(
        lambda: keras_dist.MultiWorkerMirroredStrategy(variables="sharded")
    )


def test_several_devices_of_a_process_are_refused():
    with pytest.raises(DeviceError, match="keras-dist run"):
        sharded_variables(2)
    for text in clusters.run(
        made_with_devices, workers=2, devices=2, timeout=300
    ):
        assert "DeviceError" in text
        assert "a process for each device" in text
    # One worker with one device is plain.
    strategy = keras_dist.MirroredStrategy(["cpu:0"], variables="sharded")
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
    assert type(variable) is keras.Variable
