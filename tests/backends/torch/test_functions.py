"""Compiled functions are PyTorch's, and replicas meet outside of them."""

import functools
import threading

import keras
import pytest
import torch

import keras_dist
from functions.helpers import array
from functions.helpers import ids
from functions.helpers import numbers
from functions.helpers import strategy_of

ops = keras.ops


@pytest.fixture
def compiled(monkeypatch):
    """Counts graphs that are compiled; the list holds their operations."""
    graphs = []

    def backend(module, inputs):
        nodes = module.graph.nodes
        graphs.append([n.target for n in nodes if n.op == "call_function"])
        return module.forward

    # Generating code for each graph would take most of the test's time.
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend=backend)
    )
    yield graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_replicas_meet_outside_of_compiled_regions(compiled, num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        v = keras.Variable(0.0, aggregation="sum", trainable=False)

    def step(x):
        y = torch.sin(x) * 2.0
        total = keras_dist.get_replica_context().all_reduce("SUM", y)
        v.assign_add(x)
        return torch.cos(total)

    x = ids(strategy)
    expected = numbers(strategy.run(step, (x,)))
    added = float(array(v))
    fast = keras_dist.function(step, jit_compile=True)
    for _ in range(2):
        v.assign(0.0)
        assert numbers(strategy.run(fast, (x,))) == expected
        assert float(array(v)) == added
    operations = [name for graph in compiled for name in graph]
    assert torch.sin in operations and torch.cos in operations


def test_state_of_threads_is_in_no_class():
    """PyTorch 2.11 would trace the class' value in place of the thread's."""
    kinds = [
        kind
        for kind in threading.local.__subclasses__()
        if kind.__module__.startswith("keras_dist")
    ]
    assert kinds
    for kind in kinds:
        values = {
            name
            for name, value in vars(kind).items()
            if not (name.startswith("__") or callable(value))
        }
        assert not values, kind


def test_it_runs_as_it_is_unless_asked(compiled):
    double = keras_dist.function(lambda x: x * 2)
    assert float(double(torch.ones(()))) == 2.0
    assert not compiled


def test_gradients_of_pytorch_flow_through_it():
    x = torch.tensor(3.0, requires_grad=True)
    square = keras_dist.function(lambda x: x * x)
    (gradient,) = torch.autograd.grad(square(x), x)
    assert float(gradient) == 6.0


def test_jit_compile_without_a_strategy(compiled):
    @keras_dist.function(jit_compile=True)
    def shifted(x, by):
        return torch.sin(x) + by

    for by in (1.0, 2.0):
        assert float(shifted(torch.zeros(()), by)) == by
    assert any(torch.sin in graph for graph in compiled)
