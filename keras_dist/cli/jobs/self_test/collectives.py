"""A test of `run` and of the collectives of replicas."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.cli.jobs.self_test.parity import DifferentNumbersError
from keras_dist.replica.replica_context import get_replica_context
from keras_dist.strategies.mirrored import MirroredStrategy


def check_collectives(devices: Sequence[str]) -> str:
    """Runs a function on each device, and checks collectives of its results.

    Returns the names of what was checked.

    Raises:
        DifferentNumbersError: If a number is not what it should be.
    """
    strategy = MirroredStrategy(devices)
    count = len(devices)
    rows = np.arange(2 * count + 1, dtype="float32")
    dataset = strategy.experimental_distribute_dataset([rows])
    own = next(iter(dataset))

    def replica_fn(x: Any) -> Any:
        context = get_replica_context()
        assert context is not None
        replica = float(context.replica_id_in_sync_group)
        ids = keras.ops.convert_to_tensor(replica, "float32")
        return ids, context.all_reduce("SUM", keras.ops.sum(x)), x

    ids, total, again = strategy.run(replica_fn, args=(own,))
    ranks = np.arange(count)
    _check("run", strategy.experimental_local_results(ids), ranks)
    _check(
        "all_reduce",
        strategy.experimental_local_results(total),
        [rows.sum()] * count,
    )
    _check(
        "reduce SUM", [strategy.reduce("SUM", ids, axis=None)], [ranks.sum()]
    )
    _check(
        "reduce MEAN", [strategy.reduce("MEAN", ids, axis=None)], [ranks.mean()]
    )
    mean = strategy.reduce("MEAN", again, axis=0)
    _check("reduce over rows", [mean], [rows.mean()])
    gathered = keras.ops.convert_to_numpy(strategy.gather(again, axis=0))
    _check("gather", list(gathered), list(rows))
    return "run, all_reduce, reduce and gather"


def _check(what: str, actual: Sequence[Any], expected: Any) -> None:
    numbers = [float(keras.ops.convert_to_numpy(each)) for each in actual]
    wanted = [float(each) for each in expected]
    if len(numbers) != len(wanted) or not np.allclose(numbers, wanted):
        raise DifferentNumbersError(
            f"`{what}` gave {numbers}. Expected: {wanted}."
        )
