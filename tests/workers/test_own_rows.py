"""Each worker loads its own rows, and the numbers stay those of one process."""

import functools
import importlib.util

import pytest

from parity.harness import BACKEND
from parity.harness import assert_same
from parity.harness import drop_iterations
from workers import clusters
from workers import own_rows_jobs as jobs

needs_torch = pytest.mark.skipif(
    not jobs.HAS_TORCH, reason="the data is PyTorch's"
)
needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="of tf.data"
)
LOADER = ("loader",) if jobs.HAS_TORCH else ()
CLOSE = {"rtol": 2e-6, "atol": 1e-6}


def run(fn, *args, workers=2, devices=1):
    return clusters.run(fn, args, workers=workers, devices=devices, timeout=300)


def compare(results, expected):
    results, expected = dict(results), dict(expected)
    drop_iterations(results, expected)
    assert_same(results, expected, **CLOSE)


def share(sizes, workers):
    """The most rows that a worker loads of batches of these sizes."""
    return sum(-(-size // workers) for size in sizes)


def loads_of(everyone, table=jobs.SOURCES):
    """Compares the results of all workers with those of plain Keras.

    Yields what each has loaded: by `fit` and its relatives, lists of sizes; of
    all workers, and of plain Keras.
    """
    names = list(everyone[0])
    for name, (expected, plain) in jobs.outcomes(names, None, table).items():
        for worker in everyone:
            compare(worker[name][0], expected)
        yield [worker[name][1] for worker in everyone], plain


@pytest.mark.parametrize(
    ("workers", "names"),
    [(2, tuple(jobs.SOURCES)), (3, ("rows", "threads", *LOADER))],
    ids=["2", "3"],
)
def test_rows_loaded_and_numbers(workers, names):
    everyone = run(jobs.own, names, workers=workers)
    for name, (loads, plain_loads) in zip(
        names, loads_of(everyone), strict=True
    ):
        # `fit` has two sources. The first batch of each is loaded whole.
        for place, sources in enumerate((2, 1, 1)):
            plain = plain_loads[place]
            most = share(plain, workers) + sources * jobs.BATCH_SIZE
            is_ahead = name in ("threads", "loader_with_processes")
            if is_ahead:
                # What was loaded when a pass is given up varies.
                most += share([6, 6, 6, 1], workers)
            sums = [sum(worker[place]) for worker in loads]
            assert max(sums) <= most
            # All rows were loaded by someone.
            assert is_ahead or sum(sums) >= sum(plain)


@pytest.mark.parametrize("devices", [1, 2])
def test_data_that_a_function_makes(devices):
    expected = jobs.with_functions(None)
    for index, results in enumerate(run(jobs.own_functions, devices=devices)):
        for name, (outcome, pipelines) in results.items():
            compare(outcome, expected[name][0])
            # PyTorch's eager steps need no rows of other workers.
            is_own = name == "whole" or (name, BACKEND) == ("eager", "torch")
            assert pipelines == ([index] if is_own else [0, 1])


@needs_tensorflow
@pytest.mark.parametrize("workers", [2, 3])
def test_rows_of_tf_data(workers):
    expected, plain_loaded = jobs.with_tf_data(None)
    loaded = []
    for results, rows in run(jobs.own_tf_data, workers=workers):
        compare(results, expected)
        loaded += rows
    # The last batch has one row, which workers without rows load too.
    assert len(loaded) == len(plain_loaded) + workers - 1
    assert set(loaded) == set(plain_loaded)


@needs_tensorflow
def test_a_dataset_of_own_rows_where_it_can_not_be_used():
    for eager, others, plain in run(jobs.misused_tf_data):
        if BACKEND != "torch":  # which has no other steps
            assert "needs them: steps run operation by operation" in eager
        assert others.startswith("ReplicaDivergenceError: Workers were given")
        assert plain.split(":")[0] in ("ValueError", "RuntimeError")


def test_several_devices_a_worker():
    everyone = run(jobs.own, ["py_dataset"], devices=2)
    for loads, plain_loads in loads_of(everyone):
        for worker in loads:
            assert sum(worker[0]) < 0.8 * sum(plain_loads[0])


def test_what_can_not_be_chosen_is_read_whole():
    everyone = run(jobs.own, list(jobs.WHOLE), "WHOLE")
    for loads, plain_loads in loads_of(everyone, jobs.WHOLE):
        for worker in loads:
            assert worker[1:] == plain_loads[1:]


def test_it_can_be_switched_off():
    job = functools.partial(jobs.own, KERAS_DIST_OWN_ROWS="0")
    for loads, plain_loads in loads_of(run(job, ["py_dataset"])):
        for worker in loads:
            assert worker == plain_loads


def test_without_a_comparison_no_batch_is_loaded_whole():
    job = functools.partial(jobs.own, KERAS_DIST_CHECK_DATA="0")
    for loads, plain_loads in loads_of(run(job, ["rows", *LOADER])):
        for worker in loads:
            for sizes, plain in zip(worker, plain_loads, strict=True):
                assert sum(sizes) <= share(plain, 2)


ARRAYS = {
    "shuffled": {"shuffle": True, "batch_size": jobs.BATCH_SIZE},
    "shuffled_batches": {"shuffle": "batch", "batch_size": jobs.BATCH_SIZE},
    "weighted": {"batch_size": 6, "sample_weight": jobs.WEIGHTS},
    "split": {"batch_size": 5, "validation_split": 0.3},
    "validated": {"batch_size": 5, "validation_data": (jobs.X, jobs.Y)},
    "one_batch": {"batch_size": 64},
    "steps": {"batch_size": 3, "steps_per_epoch": 3, "shuffle": False},
}


@pytest.mark.parametrize(
    ("workers", "names"),
    [(2, tuple(ARRAYS)), (3, ("shuffled", "split"))],
    ids=["2", "3"],
)
def test_arrays(workers, names):
    options = {name: ARRAYS[name] for name in names}
    expected = jobs.with_arrays(None, options)
    for results in run(jobs.own_arrays, options, workers=workers):
        for name in names:
            compare(results[name], expected[name])


@pytest.mark.skipif(
    BACKEND == "tensorflow", reason="TensorFlow takes rows in its own program"
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_taken_of_an_array(shuffle):
    """No batch is taken whole: the array is compared before."""
    first, second = run(jobs.taken_of_array, shuffle)
    full, last = [jobs.BATCH_SIZE // 2] * 3, jobs.ROWS % jobs.BATCH_SIZE
    # Keras reads one batch before, to build the model.
    for taken in (first, second):
        assert [len(rows) for rows in taken[-4:]] == [*full, last]
    given = [
        row
        for pair in zip(first[-4:-1], second[-4:-1], strict=True)
        for rows in pair
        for row in rows
    ] + first[-1]
    assert sorted(given) == list(range(jobs.ROWS))
    assert (given == sorted(given)) is not shuffle


def test_loading_draws_apart_from_training():
    first, second = run(jobs.drawn)
    assert first[0] == first[1]
    assert second[0] == second[1]
    # The whole first batch is alike, and nothing else.
    assert first[0][0][-8:] != second[0][0][-8:]
    assert first[0][1] == second[0][1]


@pytest.mark.parametrize(
    "kind", ["py_dataset", pytest.param("loader", marks=needs_torch)]
)
def test_an_order_that_differs_later_is_an_error(kind):
    for told in run(jobs.drifting, kind):
        assert told.startswith("ReplicaDivergenceError: Workers have read rows")
        assert "other rows on worker 1 than on worker 0" in told


def test_the_first_fit_says_how_data_is_loaded():
    chief, _ = run(jobs.banners)
    assert [line.split("; ")[4] for line in chief] == [
        "each worker loads its own rows",
        "each worker reads all of the data and takes its own rows "
        "(`__getitem__` of WithoutParameter has no `own`)",
        "each worker reads all of the data and takes its own rows "
        "(KERAS_DIST_OWN_ROWS=0)",
    ]


@pytest.mark.parametrize(
    "kind",
    ["py_dataset", "threads", pytest.param("loader", marks=needs_torch)],
)
def test_the_first_batch_is_compared_whole(kind):
    for told in run(jobs.other_values, kind):
        assert isinstance(told, str), "rows of other values were not noticed"
        assert told.startswith("ReplicaDivergenceError: Workers were given")


def test_a_model_that_runs_eagerly_after_all():
    """Keras keeps the function of the first call."""
    for results in run(jobs.eager_after_all, workers=3):
        first = results["0"]
        assert_same(results, dict.fromkeys(results, first), **CLOSE)


def test_epochs_shorter_than_a_pass_are_no_error():
    """However far a worker has read ahead."""
    for told in run(jobs.parts_of_passes):
        assert told == ["", "", ""]


def test_a_plain_model_in_a_callback_reads_all_rows():
    for apart in run(jobs.beside_a_plain_model):
        assert apart == [0.0, 0.0]
