"""`strategy.run` and its relatives over several workers."""

import functools

import numpy as np
import pytest

import keras_dist
from conformance.contract import contract
from workers import clusters
from workers import replica_jobs

# The tests of a shape share one job.
EVERYWHERE = pytest.mark.runs_on("jax", "tensorflow", "torch")
SHAPES = [
    pytest.param((2, 1), marks=pytest.mark.runs_on("torch"), id="2x1"),
    pytest.param((2, 2), marks=EVERYWHERE, id="2x2"),
]


@functools.cache
def seen(shape):
    workers, devices = shape
    return clusters.run(
        replica_jobs.everything, workers=workers, devices=devices, timeout=400
    )


@pytest.fixture(params=SHAPES)
def shape(request):
    return request.param


def part(shape, name):
    """For each worker, what that function returned."""
    found = [results[name] for results in seen(shape)]
    for worker, each in enumerate(found):
        assert not isinstance(each, str), f"worker {worker}: {each}"
    return found


def joined(found, key=None):
    """The local results of all workers, in replica order."""
    return [
        each if key is None else each[key]
        for worker in found
        for each in worker
    ]


def ids(shape):
    return list(range(shape[0] * shape[1]))


@contract(218, 225, native=False)
def test_ids_are_global_and_consecutive(shape):
    found = part(shape, "identity")
    count = len(ids(shape))
    assert joined([each["ids"] for each in found]) == [
        (index, count) for index in ids(shape)
    ]
    assert [each["chief"] for each in found] == [True, False]
    assert [each["summary"] for each in found] == [True, False]
    assert [each["tasks"] for each in found] == [0, 1]
    assert {each["devices"] for each in found} == {shape[1]}


@contract(219, native=False)
def test_a_workers_only_replica_gives_plain_values(shape):
    found = part(shape, "identity")
    assert [each["wrapped"] for each in found] == [shape[1] > 1] * 2


@contract(218, native=False)
def test_values_from_a_function(shape):
    found = joined(part(shape, "values"))
    assert found == [2.0 * index for index in ids(shape)]


@contract(220, native=False)
def test_reductions(shape):
    every = ids(shape)
    rows = [[float(index)] * 2 for index in every for _ in range(index)]
    expected = {
        "sum": sum(every),
        "mean": np.mean(every),
        "max": max(every),
        "min": 0,
        "rows_sum": np.sum(rows, axis=0).tolist(),
        "rows_mean": np.mean(rows, axis=0).tolist(),
        "rows_max": np.max(rows, axis=0).tolist(),
        "gather": rows,
        "gather_last": [[float(index) for index in every]] * 2,
    }
    for found in part(shape, "reductions"):
        assert found.keys() == expected.keys()
        for key, want in expected.items():
            np.testing.assert_allclose(found[key], want, rtol=1e-6, err_msg=key)


@contract(67, native=False)
def test_each_worker_gives_its_part(shape):
    count = float(len(ids(shape)))
    for found in part(shape, "host_values"):
        assert found.pop("host", count) == count
        assert found == {"run": count, "to": count, "batch": [count, count]}


def test_collectives_in_replicas(shape):
    every = ids(shape)
    rows = [index for index in every for _ in range(index + 1)]
    found = joined(part(shape, "collectives"))
    assert len(found) == len(every)
    for each in found:
        assert each == {
            "sum": sum(every),
            "mean": np.mean(every),
            "max": max(every),
            "count": len(every),
            "gather": rows,
            "numbers": rows,
            "merged": sum(every),
        }


def test_gradients_flow_between_workers(shape):
    every = [index + 1.0 for index in ids(shape)]
    weight = sum(every)
    found = joined(part(shape, "gradients"))
    # d/dx of `own * sum(x * x)` on all replicas, and of as many sums of
    # squares as there are replicas.
    expected = [2 * x * (weight + len(every)) for x in every]
    np.testing.assert_allclose(np.ravel(found), expected, rtol=1e-6)


@contract(117, 219, 220, native=False)
def test_variables(shape):
    every = ids(shape)
    found = part(shape, "variables")
    for each in found:
        assert each["initial"] == 10.0
        assert each["mean"] == np.mean(every)
        assert each["chiefs"] == 5.0
        assert each["on_read"] == 2.0 * sum(index + 1 for index in every)
        assert each["printed"] == shape[1]
    own = joined([each["own"] for each in found])
    assert own == [2.0 * (index + 1) for index in every]


def test_metrics(shape):
    every = ids(shape)
    for before, after, reset in part(shape, "metrics"):
        assert before == pytest.approx(np.mean(every))
        assert after == pytest.approx((sum(every) + 7.0) / (len(every) + 1))
        assert reset == 0.0


def test_an_update_sums_all_gradients(shape):
    total = sum(index + 1 for index in ids(shape))
    for weights in part(shape, "updates"):
        np.testing.assert_allclose(weights, [-0.1 * total] * 2, rtol=1e-6)


def test_a_custom_loop(shape):
    expected = keras_dist.launch(
        replica_jobs.alone, workers=1, devices=1, timeout=400
    )[0]
    for found in part(shape, "loop"):
        np.testing.assert_allclose(
            found["losses"], expected["losses"], rtol=1e-4, atol=1e-6
        )
        assert found["metric"] == pytest.approx(expected["metric"], rel=1e-4)
        for mine, want in zip(
            found["weights"], expected["weights"], strict=True
        ):
            np.testing.assert_allclose(mine, want, rtol=1e-4, atol=1e-5)
