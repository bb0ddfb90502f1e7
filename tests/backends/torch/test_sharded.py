"""An optimizer in parts costs workers one scatter and one gather a step."""

import pytest

from workers import clusters
from workers import sharded_jobs


def launched(job, *args, workers=2):
    return clusters.run(job, args, workers=workers, devices=1, timeout=400)


@pytest.mark.parametrize("workers", [2, 3])
def test_no_whole_slot_is_alive(workers):
    of_model = 4 * 1000 * 1001
    # Rows of 1,000 numbers: the largest part has 334 of 1,000.
    limit = of_model + 2 * 4 * 1001 * -(-1000 // workers) + 1000
    limits = limit, 3 * of_model + 1000  # with some numbers
    found = launched(sharded_jobs.bytes_of_slots, limits, workers=workers)
    for parts, whole, largest in found:
        assert parts <= limits[0], largest
        assert 3 * of_model <= whole <= limits[1]


@pytest.mark.parametrize(
    ("options", "scale", "small"),
    [
        ({}, None, []),
        ({"global_clipnorm": 1.0}, None, [4]),
        ({"clipnorm": 1.0}, None, [4]),
        ({}, 8.0, [4]),
        ({"clipnorm": 1.0}, 8.0, [4, 4]),
    ],
)
def test_one_reduce_scatter_and_one_all_gather_a_step(options, scale, small):
    found = launched(sharded_jobs.collectives, options, scale)
    # Parts of a (4, 5) kernel, its bias of 5, a (5, 3) kernel and its bias.
    size = 10 + 3 + 9 + 2
    for worker in found:
        # Beside them are flags, and the sum and the count of the loss.
        assert worker["scatter_sum"] == [2 * (size + 4 + 2)]
        assert worker["gather_flat"] == [size]
        assert worker["by DTensor"] == 0
        assert "start_sum" not in worker
        of_norms = [
            e for e in worker.get("exchange", ()) if "norms of grad" in e
        ]
        assert len(of_norms) == len(small)
        for text, count in zip(of_norms, small, strict=True):
            assert f"float32[{count}]" in text
        assert len(worker.get("exchange", ())) == len(small)


def test_small_variables_are_updated_whole():
    for worker in launched(sharded_jobs.collectives, {}, None, 10):
        # Of the biases, each worker gets the whole sum.
        assert worker["scatter_sum"] == [2 * (10 + 5 + 9 + 3 + 4 + 2)]
        assert worker["gather_flat"] == [10 + 9]


def test_a_parameter_that_is_not_contiguous():
    launched(
        sharded_jobs.passes,
        sharded_jobs.__name__,
        "trains_what_is_not_contiguous",
    )


def test_what_workers_that_share_a_gpu_can_not_update():
    for adam, lamb, constrained in launched(sharded_jobs.refused_on_one_gpu):
        assert adam == ""
        assert "share a GPU" in lamb and "Lamb" in lamb
        assert "a constraint of" in constrained


def test_workers_are_alike_after_an_update_that_failed():
    first, second = launched(sharded_jobs.weights_after_a_failed_update)
    for own, theirs in zip(first, second, strict=True):
        for a, b in zip(own, theirs, strict=True):
            assert (a == b).all()


def test_gradients_that_can_not_be_right_are_refused():
    for found in launched(sharded_jobs.refused_outside_of_steps):
        wide, numpy, others, value = found
        assert wide.startswith("ValueError") and "shape (12, 8)" in wide
        assert numpy.startswith("ValueError") and "array" in numpy
        assert others.startswith("ReplicaDivergenceError")
        assert "different gradients" in others and "[[48.0], [96.0]]" in others
        assert value == pytest.approx([-0.1])


def test_what_dtensor_can_not_do_is_explained():
    for error, is_on, is_on_later in launched(sharded_jobs.beyond_dtensor):
        assert error.startswith("UnsupportedModelError")
        assert "Flattens can't update variables in parts" in error
        assert "Cannot flatten unevenly sharded tensor" in error
        assert (is_on, is_on_later) == (True, False)
