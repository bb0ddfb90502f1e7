"""PyTorch: what an optimizer in parts costs, counted."""

import dataclasses
import gc

import keras
import numpy as np
import pytest
import torch

from parity.harness import sharded
from parity.harness import strategy as mirrored
from sharded.helpers import X
from sharded.helpers import Y
from sharded.helpers import network
from workers import clusters
from workers import sharded_jobs

NUM_PARAMETERS = 1000 * 1001


def live_storages():
    """The bytes of each storage that a tensor is alive in."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def bytes_of_training(make, num_replicas):
    """What a model with Adam adds to what is alive, after a few steps."""
    before = live_storages()
    with make(num_replicas).scope():
        model = keras.Sequential(
            [keras.Input((1000,)), keras.layers.Dense(1000)]
        )
        model.compile("adam", "mse")
    x = np.zeros((8, 1000), "float32")
    model.fit(x, x, batch_size=4, verbose=0)
    for variable in model.trainable_variables:
        variable.value.grad = None
    model.optimizer.variables[2].numpy()
    after = live_storages()
    added = [size for where, size in after.items() if where not in before]
    return added, model


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_no_whole_slot_is_alive(num_replicas):
    whole, first = bytes_of_training(mirrored, num_replicas)
    parts, second = bytes_of_training(sharded, num_replicas)
    slots = 2 * 4 * NUM_PARAMETERS
    assert sum(whole) >= 1.5 * slots
    # Parts are as much together, and nothing else is alive: padding, and
    # scalars of 1 %.
    assert sum(parts) <= 1.01 * sum(whole)
    of_slots = [size for size in parts if size != 4 * 1000 * 1000]
    assert len(parts) - len(of_slots) == 1  # the kernel itself
    assert max(of_slots) <= -(-(4 * 1000 * 1000) // num_replicas) + 4
    del first, second


def test_slots_are_cut_as_they_are_made():
    with sharded(4).scope():
        model = network()
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    made = [vars(slot).get("_value") for slot in optimizer.variables[2:]]
    assert made == [None] * 8


@pytest.mark.parametrize(
    ("options", "small"),
    [({}, 0), ({"global_clipnorm": 1.0}, 1), ({"clipnorm": 1.0}, 4)],
)
def test_one_reduce_scatter_and_one_all_gather_a_step(options, small):
    found = clusters.run(
        sharded_jobs.collectives, (options,), workers=2, devices=2, timeout=400
    )
    # 4 parts of 20, 5, 15 and 3 parameters.
    size = 5 + 2 + 4 + 1
    for worker in found:
        assert worker["scatter_sum"] == [2 * (2 * size + 4)]
        assert worker["gather_flat"] == [2 * size]
        assert "start_sum" not in worker
        of_norms = [e for e in worker["exchange"] if f"float32[{small}]" in e]
        assert len(of_norms) == bool(small)
        # Beside it, the metrics of the step.
        assert len(worker["exchange"]) - bool(small) <= 1


def test_a_parameter_that_is_not_contiguous():
    outcomes = []
    for make in (None, sharded(3)):
        scope = make.scope() if make else keras.name_scope("none")
        with scope:
            model = network()
            for variable in model.trainable_variables:
                data = variable.value.data
                if data.ndim == 2:
                    variable.value.data = data.t().contiguous().t()
            model.compile("adam", "mse")
        model.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
        outcomes.append(model.get_weights())
    for own, plain in zip(*outcomes, strict=True):
        np.testing.assert_allclose(own, plain, rtol=2e-5, atol=1e-6)


def test_replicas_on_several_devices(monkeypatch):
    """Two names of one device go the way that several devices go."""
    weights = []
    for strategy in (None, sharded(3)):
        with strategy.scope() if strategy else keras.name_scope("none"):
            model = network()
            model.compile(keras.optimizers.Adam(0.01, clipnorm=0.5), "mse")
        if strategy:
            names = [torch.device("cpu"), torch.device("cpu", 0)]
            assert names[0] != names[1]
            executor = strategy.executor
            places = dataclasses.replace(
                executor._places, devices=[*names, names[0]]
            )
            monkeypatch.setattr(executor, "_places", places)
        model.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for own, plain in zip(*weights, strict=True):
        np.testing.assert_allclose(own, plain, rtol=2e-5, atol=1e-6)
