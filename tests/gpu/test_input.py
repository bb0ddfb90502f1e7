"""The next batch is copied to the GPU while it computes."""

import time

import keras
import numpy as np
import pytest

import keras_dist
from gpu import numbers
from gpu import places

BACKEND = keras.backend.backend()
SIDE, ROWS, STEPS = (8, 4, 3) if places.IS_REHEARSAL else (128, 64, 12)


def images_and_model(scope):
    with scope:
        model = keras.Sequential([keras.Input((SIDE, SIDE, 3))])
        for _ in range(6):
            model.add(keras.layers.Conv2D(32, 3, padding="same"))
        model.add(keras.layers.GlobalAveragePooling2D())
        model.compile("sgd", "mse")
    x = np.ones((ROWS * STEPS, SIDE, SIDE, 3), "float32")
    return x, np.zeros((len(x), 32), "float32"), model


@pytest.mark.skipif(BACKEND != "torch", reason="It reads PyTorch's profile.")
def test_copies_and_computation_at_the_same_time(facts):
    from torch import profiler

    strategy = keras_dist.OneDeviceStrategy(places.DEVICE)
    x, y, model = images_and_model(strategy.scope())
    model.fit(x, y, batch_size=ROWS, verbose=0)
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU]
        + [profiler.ProfilerActivity.CUDA] * (not places.IS_REHEARSAL)
    ) as profile:
        model.fit(x, y, batch_size=ROWS, verbose=0)
    spans = [
        (each.name, each.time_range.start, each.time_range.end)
        for each in profile.events()
        if "CUDA" in str(each.device_type)
    ]
    copies = [each for each in spans if "HtoD (Pinned" in each[0]]
    kernels = [each for each in spans if not each[0].startswith("Mem")]
    beside = [
        (start, end)
        for _, start, end in copies
        if any(start < stop and begin < end for _, begin, stop in kernels)
    ]
    facts.measured("copies of batches in pinned memory", len(copies))
    facts.measured("of these, while a kernel computes", len(beside))
    if facts.is_shown("overlap", "CPUs copy nothing"):
        assert len(copies) >= STEPS
        assert len(beside) >= STEPS // 2


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_time_of_a_step_with_images(ahead, facts):
    strategy = keras_dist.OneDeviceStrategy(places.DEVICE)
    strategy.batches_ahead = ahead
    ways = {f"{ahead} ahead": strategy.scope()}
    if not ahead:
        ways["plain Keras"] = numbers.plain_keras()
    for name, scope in ways.items():
        x, y, model = images_and_model(scope)
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            model.fit(x, y, batch_size=ROWS, verbose=0)
            seconds.append((time.perf_counter() - start) / STEPS)
        facts.measured(f"a step of images, {name}", min(seconds[1:]), "s")
        assert np.isfinite(model.get_weights()[0]).all()
