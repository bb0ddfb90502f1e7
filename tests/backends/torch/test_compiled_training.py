"""Workers compile a model's training step, and the numbers stay."""

import warnings

import pytest

import keras_dist
from backends.torch import compiled_jobs as jobs
from parity.harness import assert_same
from parity.harness import drop_iterations
from workers import clusters


def run(fn, *args, workers=2, devices=1):
    return clusters.run(fn, args, workers=workers, devices=devices, timeout=500)


def compare(results, expected):
    drop_iterations(results, expected)
    assert_same(results, expected, rtol=3e-6, atol=2e-6)


def test_numbers_and_graphs():
    expected, *_, draw = jobs.train_rich(True)
    for results, graphs, breaks, next_draw in run(jobs.train_rich, False):
        for each, plain in zip(results, expected, strict=True):
            compare(each, dict(plain))
        # A callback has changed an attribute that is in one of both graphs.
        assert graphs == [3, 3]
        assert not breaks
        assert next_draw == draw


def test_masks_and_schedules():
    expected, *_ = jobs.train_padded(True)
    for results, graphs, breaks in run(jobs.train_padded, False, workers=3):
        compare(results, dict(expected))
        assert (graphs, breaks) == (2, 0)


def test_batches_of_several_shapes():
    expected, _ = jobs.train_batches(True)
    for results, graphs in run(jobs.train_batches, False):
        compare(results, dict(expected))
        # One row is not enough for two workers; 6 rows come alone.
        assert graphs == [2, 4, 4]


def test_models_are_released():
    assert run(jobs.train_and_forget) == [True, True]


def test_a_step_that_goes_another_way_later():
    for error in run(jobs.assign_later):
        assert "compiled step assigns variable" in error
    for error in run(jobs.draw_later):
        assert "compiled step has come to another dropout" in error


@pytest.mark.parametrize("name", jobs.EAGER)
def test_eager_with_a_reason(name):
    expected, _ = jobs.run_eager(name, True)
    (chief, told), (other, told_by_other) = run(jobs.run_eager, name, False)
    compare(chief, dict(expected))
    compare(other, dict(expected))
    told = [text for text in told if jobs.NOT_COMPILED in text]
    assert len(told) == 1
    assert jobs.EAGER[name][-1] in told[0]
    assert jobs.NOT_COMPILED not in "".join(told_by_other)


def test_no_compiler_on_a_worker():
    expected, _ = jobs.train_batches(True)
    everyone = run(jobs.without_compiler, 1)
    for results, graphs, _ in everyone:
        compare(results, dict(expected))
        assert graphs[-1] == graphs[0]
    told = [warned for *_, warned in everyone]
    assert len(told[0]) == 1 and "/no/compiler" in told[0][0]
    assert not told[1]


def test_replicas_of_one_process():
    with keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = jobs.one()
        model.compile("sgd", "mse", jit_compile=True)
    with pytest.warns(UserWarning, match=r"(?s)take turns.*keras-dist run"):
        model.fit(jobs.X, jobs.Y, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(jobs.X, jobs.Y, verbose=0)
        model.evaluate(jobs.X, jobs.Y, verbose=0)
