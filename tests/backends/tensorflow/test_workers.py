"""Workers on loopback: their collectives, and the numbers of one device."""

import pickle

import numpy as np
import pytest
import worker_cases
from worker_processes import Workers

from keras_dist.launch.addresses import free_addresses

TOPOLOGIES = {"2x1": (2, 1), "2x2": (2, 2), "3x1": (3, 1)}
# CI has 3 workers, and workers of one device, in `tests/workers`.
ONLY_IN_FULL = ("2x1", "3x1")


# Seconds that everything may take, by far: on a busy machine the import of
# TensorFlow alone took 30.
LIMIT = 300


class Launched:
    """What each worker of a topology found.

    Attributes:
        found: List with each worker's dict by case.
        workers: Integer.
        devices: Integer, of each worker.
        replicas: Integer, over all workers.
    """

    def __init__(self, folder, workers, devices):
        self.workers, self.devices = workers, devices
        self.replicas = workers * devices
        launched = Workers(
            folder,
            "worker_cases.py",
            free_addresses(workers),
            lambda index: [folder / f"{index}.pkl"],
            devices=devices,
        )
        try:
            for index in range(workers):
                status = launched.wait(index, LIMIT)
                assert status == 0, launched.printed(index)[-3000:]
        finally:
            launched.end()
        self.found = [
            pickle.loads((folder / f"{index}.pkl").read_bytes())
            for index in range(workers)
        ]

    def __getitem__(self, case):
        return [found[case] for found in self.found]

    def each(self, case):
        """Each worker's index, and what it found."""
        return enumerate(self[case])

    def replicas_of(self, worker):
        return range(worker * self.devices, (worker + 1) * self.devices)


def _topologies():
    for name in TOPOLOGIES:
        marks = [pytest.mark.runs_on()] if name in ONLY_IN_FULL else []
        yield pytest.param(name, marks=marks)


@pytest.fixture(scope="module", params=_topologies())
def launched(request, tmp_path_factory):
    return Launched(tmp_path_factory.mktemp("w"), *TOPOLOGIES[request.param])


@pytest.fixture(scope="module")
def plain():
    """What one device makes of the same script."""
    return worker_cases.train(worker_cases.make_model())


def test_devices_are_those_of_the_worker(launched):
    names = [f"cpu:{i}" for i in range(launched.devices)]
    for found in launched["devices"]:
        assert found == (names, names, launched.replicas)


def test_reduce_and_gather_are_over_all_replicas(launched):
    n = launched.replicas
    total = n * (n - 1) / 2
    for worker, found in launched.each("reductions"):
        np.testing.assert_array_equal(found["sum"], [total, n])
        np.testing.assert_array_equal(found["mean"], [total / n, 1])
        assert found["sum_rows"] == total + n
        assert found["mean_rows"] == (total + n) / (2 * n)
        rows = [value for i in range(n) for value in (i, 1)]
        np.testing.assert_array_equal(found["gather"], rows)
        own = [[i, 1] for i in launched.replicas_of(worker)]
        np.testing.assert_array_equal(found["local"], own)


def test_replicas_know_their_place_among_all(launched):
    for worker, found in launched.each("replica_ids"):
        own = [[i, launched.replicas] for i in launched.replicas_of(worker)]
        np.testing.assert_array_equal(found, own)


@pytest.mark.parametrize("how", ["eager", "traced"])
def test_all_reduce_and_all_gather_have_gradients(launched, how):
    n = launched.replicas
    values = np.stack([1.0 + np.arange(n), np.full(n, 2.0)], axis=1)
    factors = 1.0 + np.arange(n)
    total = (values * factors[:, None]).sum(axis=0)
    joined = np.concatenate(
        [values[i, : i % 2 + 1] for i in range(n)], dtype="float64"
    )
    for worker, found in launched.each("collectives"):
        for place, i in enumerate(launched.replicas_of(worker)):
            own = {name: each[place] for name, each in found[how].items()}
            np.testing.assert_allclose(own["t"], total)
            np.testing.assert_allclose(own["j"], joined)
            value = (total**2).sum() + factors[i] * (joined**2).sum()
            np.testing.assert_allclose(own["v"], value)
            # Every replica's loss counts: the sum of all is differentiated.
            gradient = 2 * n * total * factors[i]
            sent = i % 2 + 1
            gradient[:sent] += 2 * factors.sum() * values[i, :sent]
            np.testing.assert_allclose(own["g"], gradient)


def test_variables_combine_what_all_replicas_assign(launched):
    n = launched.replicas
    mean, total = (n - 1) / 2, n * (n + 1) / 2
    for found in launched["variables"]:
        for times, (mirrored, counted) in enumerate(found, start=1):
            np.testing.assert_allclose(
                mirrored, [1 + times * mean, 2 + times], rtol=1e-6
            )
            assert counted == times * total


def test_numbers_of_any_dtype_travel(launched):
    n = launched.workers
    ones = [n * (n + 1) // 2, 2 * n]
    sums = [*[ones] * 12, [complex(*ones)], [], 3 * n]

    def sent_by(worker):
        one = worker + 1
        own = [*[[one, 2]] * 12, [complex(one, 2)], [], 3.0]
        return [*own, [worker == 0, True]]

    for found in launched["dtypes"]:
        assert found["same"]
        assert found["sums"] == sums
        assert found["gathered"] == [sent_by(worker) for worker in range(n)]
        assert found["sent"] == sent_by(0)
        columns = [w for w in range(n) for _ in range(w)]
        assert found["joined"] == [columns, columns]


def test_no_numbers_have_a_sum(launched):
    n = launched.workers
    for found in launched["nothing"]:
        assert found == [[[], []], [[n, n], []]] * 4


def test_rows_are_gathered_whatever_their_number(launched):
    for found in launched["ragged"]:
        for factor, everyone in zip((1, 3, 0) * 2, found, strict=True):
            for worker, (rows, number, flat) in enumerate(everyone):
                count = worker * factor
                assert rows == [[worker, worker]] * count
                assert number == worker
                assert flat == [worker] * count


@pytest.mark.parametrize("how", ["eager", "traced"])
@pytest.mark.parametrize("sizes", ["as shares", "same total", "any"])
def test_rows_are_gathered_whatever_equal_shares_say(launched, how, sizes):
    for found in launched["even_shares"]:
        own, expected = found[how, sizes]
        assert own == expected


def test_known_sizes_stay_known_and_others_are_an_error(launched):
    n = launched.workers
    for shapes, error in launched["known_sizes"]:
        assert shapes == [[2, 3]] * n + [[5, 3]] * n
        assert "Workers gather tensors of different sizes" in error
        assert "Expected: " in error


def test_metrics_of_chosen_rows_are_those_of_one_device(launched):
    for found in launched["masked"]:
        for eagerly, history in found.items():
            expected = worker_cases.chosen_rows(
                worker_cases.Chosen(), run_eagerly=eagerly
            )
            assert history.keys() == expected.keys()
            for name in history:
                np.testing.assert_allclose(
                    history[name], expected[name], rtol=1e-5, err_msg=name
                )


def test_fit_evaluate_and_predict_give_the_numbers_of_one_device(
    launched, plain
):
    for found in launched["fit"]:
        for own, expected in zip(
            found["weights"], plain["weights"], strict=True
        ):
            np.testing.assert_allclose(own, expected, atol=2e-6)
        for own, expected in zip(
            found["history"], plain["history"], strict=True
        ):
            assert own.keys() == expected.keys()
            for name in own:
                np.testing.assert_allclose(
                    own[name], expected[name], atol=2e-6, err_msg=name
                )
        np.testing.assert_allclose(
            found["predictions"], plain["predictions"], atol=2e-6
        )


def test_workers_have_equal_weights_after_fit(launched):
    first, *others = launched["fit"]
    for other in others:
        for own, expected in zip(
            other["weights"], first["weights"], strict=True
        ):
            np.testing.assert_array_equal(own, expected)


def test_lists_of_rows_are_summed_as_such(launched):
    n = launched.replicas
    zeros, ones = n * (n + 1) / 2, n
    for kind, table in launched["embeddings"]:
        assert kind == "IndexedSlices"
        expected = np.ones((5, 2))
        expected[0] -= 2 * zeros
        expected[1] -= 2 * ones
        np.testing.assert_array_equal(table, expected)


def test_collectives_of_a_step(launched):
    sum_, gather = {"CollectiveReduceV2": 1}, {"CollectiveGatherV2": 1}
    for found in launched["collectives_of_a_step"]:
        # Metrics travel with the gradients, but never in 16 bits.
        assert found == {
            (None, "loss"): (sum_, sum_),
            (None, "metrics"): (sum_, sum_),
            ("bfloat16", "loss"): (sum_ | gather, sum_ | gather),
            ("bfloat16", "metrics"): (sum_ | gather, sum_ | gather),
        }


def test_gradients_travel_in_packs_and_in_fewer_bits(launched):
    n = launched.workers
    exact = n * (1 + 2.0**-12)
    integers = ("int32", 2), [n, 2 * n]
    for found in launched["packs"]:
        kinds, value, whole = found["default"]
        assert sorted(kinds) == [("float32", 20), integers[0]]
        assert (value, whole) == (exact, integers[1])
        kinds, value, whole = found["packs"]
        assert sorted(kinds) == [
            ("float32", 4),
            ("float32", 8),
            ("float32", 8),
            integers[0],
        ]
        assert (value, whole) == (exact, integers[1])
        kinds, value, whole = found["bfloat16"]
        assert sorted(kinds) == [("bfloat16", 20), integers[0]]
        assert (value, whole) == (n, integers[1])
