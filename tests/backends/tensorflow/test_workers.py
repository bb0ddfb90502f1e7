"""Workers on TensorFlow gather and sum values of any size and dtype."""

import numpy as np
import pytest
import worker_cases

from workers import clusters


class Launched:
    """What each worker found, by case."""

    def __init__(self, workers, devices):
        self.workers, self.devices = workers, devices
        self.found = clusters.run(
            worker_cases.everything,
            workers=workers,
            devices=devices,
            timeout=300,
        )

    def __getitem__(self, case):
        return [found[case] for found in self.found]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, 2), id="2x2"),
        pytest.param((3, 1), id="3x1", marks=pytest.mark.runs_on()),
    ],
)
def launched(request):
    return Launched(*request.param)


def test_devices_are_those_of_the_worker(launched):
    for found in launched["devices"]:
        assert found == [f"cpu:{i}" for i in range(launched.devices)]


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


def test_rows_are_gathered_whatever_shares_say(launched):
    for found in launched["gathered"]:
        for name, (own, expected) in found.items():
            assert own == expected, name


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
