"""The training of the self test, over several workers."""

from keras_dist.cli.jobs.self_test.parity import DifferentNumbersError
from keras_dist.cli.jobs.self_test.parity import as_worker
from keras_dist.cli.jobs.self_test.parity import check_same
from keras_dist.cli.jobs.self_test.parity import initial_weights
from keras_dist.launch.function import launch


def compare_workers(
    workers: int, devices: int | None, timeout: float, tolerance: float
) -> str:
    """Trains over several processes, and compares with plain Keras in this one.

    `devices` is the number of virtual CPU devices of each process, or `None`
    for the accelerators that each gets. `timeout` is in seconds, for all of
    them.

    Raises:
        DifferentNumbersError: If numbers differ.
        TimeoutError: If workers still ran after `timeout`.
    """
    outcomes = launch(
        as_worker,
        (initial_weights(),),
        workers=workers,
        devices=devices,
        timeout=timeout,
    )
    found = [check_same(outcome, tolerance) for outcome in outcomes]
    first, *others = outcomes
    for index, other in enumerate(others, start=1):
        for own, theirs in zip(first.weights, other.weights, strict=True):
            if (own != theirs).any():
                raise DifferentNumbersError(
                    f"worker {index} ended with other weights than worker 0. "
                    "Expected: the same on each worker."
                )
    return f"{found[0]}, alike on all workers"
