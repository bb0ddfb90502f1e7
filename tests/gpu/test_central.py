"""Central storage keeps variables on the host, and computes on the GPU."""

import time

import keras
import numpy as np
import pytest

from gpu import memory
from gpu import models
from gpu import numbers
from gpu import places

BACKEND = keras.backend.backend()


central = numbers.STRATEGIES["central"]


def large_model(width=512):
    """Returns a model of about a million parameters, compiled with Adam."""
    model = keras.Sequential(
        [
            keras.Input((width,)),
            *(keras.layers.Dense(width, "tanh") for _ in range(4)),
        ]
    )
    model.compile("adam", "mse")
    return model


def trained(model, steps=3):
    x = np.random.default_rng(0).normal(size=(8 * steps, 512))
    x = x.astype("float32")
    model.fit(x, x, batch_size=8, verbose=0)
    return model


def num_bytes(model):
    variables = [*model.weights, *model.optimizer.variables]
    return sum(int(np.prod(v.shape)) * 4 for v in variables)


def test_gpu_holds_no_variables_between_steps(facts):
    """Neither parameters nor slots are in the GPU's memory after `fit`."""
    # A framework keeps buffers of its own from its first products on.
    with numbers.plain_keras():
        plain = trained(large_model())
    before = memory.held(plain)
    with central().scope():
        model = large_model()
    trained(model)
    added = memory.held(model) - before
    kept = num_bytes(model)
    facts.measured("central: bytes of variables", kept, "bytes")
    facts.measured("central: bytes left on the GPU", added, "bytes")
    assert added < kept / 20


def test_host_holds_the_variables():
    with central().scope():
        model = trained(large_model())
    if places.IS_REHEARSAL:
        # PyTorch keeps gradients of the last step.
        assert memory.held(model, places.HOST) >= num_bytes(model)
    for variable in model.variables:
        assert "cpu" in str(_device_of(variable.value)).lower()


def _device_of(value):
    if BACKEND == "jax":
        (device,) = value.devices()
        return device.platform
    return value.device


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch pins memory itself.")
def test_variables_are_in_pinned_memory(facts):
    """Only from pinned memory is a copy to the GPU asynchronous."""
    with central().scope():
        model = trained(large_model())
    if facts.is_shown("pinned memory", "without CUDA there is none to pin"):
        assert all(v.value.is_pinned() for v in model.trainable_variables)


@pytest.mark.skipif(BACKEND != "torch", reason="It counts PyTorch's copies.")
def test_variables_are_copied_together_and_asynchronously(monkeypatch):
    """A step sends one buffer of all variables, and does not wait for it."""
    import torch

    with central().scope():
        model = trained(large_model())
    sent = []
    copy_ = torch.Tensor.copy_

    def counted(self, source, non_blocking=False):
        if source.dtype == torch.uint8:
            sent.append((source.nbytes, non_blocking))
        return copy_(self, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    counts = []
    weights = sum(v.value.nbytes for v in model.trainable_variables)
    for steps in (1, 3):
        sent.clear()
        trained(model, steps)
        assert all(is_async for _, is_async in sent)
        counts.append(sum(size >= weights for size, _ in sent))
    # The variables to the GPU, and the gradients back.
    assert (counts[1] - counts[0]) / 2 == 2


@pytest.mark.skipif(BACKEND != "jax", reason="Kinds of memory are JAX's.")
def test_speed_of_copies_from_the_host(facts):
    """Notes how much faster `pinned_host` is than JAX's CPU device."""
    import jax
    from jax.sharding import SingleDeviceSharding

    kind = None if places.IS_REHEARSAL else "gpu"
    target = jax.local_devices(backend=kind)[0]
    host = jax.local_devices(backend="cpu")[-1]
    on_gpu = SingleDeviceSharding(target)
    value = np.ones(2**22 if places.IS_REHEARSAL else 2**26, "float32")
    sources = {"a CPU device": jax.device_put(value, host)}
    kinds = {memory.kind for memory in target.addressable_memories()}
    if "pinned_host" in kinds:
        pinned = SingleDeviceSharding(target, memory_kind="pinned_host")
        sources["pinned_host"] = jax.device_put(value, pinned)
    for name, source in sources.items():
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            jax.block_until_ready(jax.device_put(source, on_gpu))
            seconds.append(time.perf_counter() - start)
        rate = value.nbytes / min(seconds[1:])
        facts.measured(f"copies to the GPU from {name}", rate, "bytes/s")
        assert rate > 0
    if facts.is_shown("pinned_host", "the CPU's own memory may lack it"):
        assert "pinned_host" in kinds


@pytest.mark.skipif(BACKEND != "jax", reason="Kinds of memory are JAX's.")
def test_gradients_leave_the_gpu_together(monkeypatch):
    """A step sends them by one call, to memory that the GPU can write."""
    from keras_dist_jax.central import storage as jax_central

    with central().scope():
        model = trained(large_model())
    if places.IS_REHEARSAL:
        monkeypatch.setattr(jax_central, "are_apart", lambda a, b: a != b)
    calls = []
    stage = jax_central.jax.device_put

    def counted(arrays, *args, **kwargs):
        if isinstance(arrays, list):
            calls.append(len(arrays))
        return stage(arrays, *args, **kwargs)

    monkeypatch.setattr(jax_central.jax, "device_put", counted)
    trained(model, steps=1)
    # At the end of `fit` metrics may come once more.
    assert max(calls) >= len(model.trainable_variables)
    assert calls.count(max(calls)) == 1


def test_time_of_a_step(facts):
    """Notes the price of central storage, for a model of 1M parameters."""
    times = {}
    for name, scope in {
        "plain Keras": numbers.plain_keras(),
        "central": central().scope(),
    }.items():
        with scope:
            model = large_model()
        trained(model)
        start = time.perf_counter()
        trained(model, steps=20)
        times[name] = (time.perf_counter() - start) / 20
        facts.measured(f"a step of 1M parameters, {name}", times[name], "s")
    facts.measured(
        "central / plain Keras, 1M parameters",
        times["central"] / times["plain Keras"],
        "ratio",
    )
    assert models.to_numpy(model.trainable_variables[0]).size == 512 * 512
