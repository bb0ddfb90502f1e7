"""The process of one backend, which describes itself and then does jobs.

The argument is a file descriptor for replies, a line of JSON each. The first
reply describes the backend and its devices; the others answer the lines of JSON
on standard input.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.cli.trial import LONGER
from keras_dist.cli.trial import OWN_MODEL
from keras_dist.cli.trial import REPORT
from keras_dist.cli.trial import Status
from keras_dist.cluster_resolver import detect
from keras_dist.cluster_resolver.tasks import cluster_of
from keras_dist.errors import KerasDistError
from keras_dist.errors import UnsupportedModelError
from keras_dist.launch.function import launch
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.backend import list_devices
from keras_dist.plugin.capabilities import shards_on_devices
from keras_dist.replica.replica_context import get_replica_context
from keras_dist.strategies.central_storage import CentralStorageStrategy
from keras_dist.strategies.mirrored import MirroredStrategy
from keras_dist.strategies.multi_worker_mirrored import (
    MultiWorkerMirroredStrategy,
)
from keras_dist.strategies.one_device import OneDeviceStrategy
from keras_dist.strategies.strategy import Strategy
from keras_dist.tools.users_function import called
from keras_dist.tools.users_function import function_of
from keras_dist.verification.report import Report


def main(channel: int) -> None:
    """Replies to requests on a file descriptor until standard input ends."""
    os.set_inheritable(channel, False)
    with os.fdopen(channel, "w") as replies:

        def reply(content: dict[str, Any]) -> None:
            replies.write(json.dumps(content) + "\n")
            replies.flush()

        reply(look())
        for line in sys.stdin:
            reply(_answer(json.loads(line)))


def look() -> dict[str, Any]:
    """Returns the backend, its devices and the cluster, as JSON has them."""
    return {
        "backend": keras.backend.backend(),
        "keras": keras.__version__,
        "devices": list_devices(),
        "shards_optimizer": shards_on_devices(get_backend()),
        "shards_variables": shards_on_devices(get_backend()),
        "cluster": _cluster(),
    }


def _cluster() -> dict[str, Any]:
    try:
        resolver, reason = detect()
        cluster = None if resolver is None else cluster_of(resolver)
    except (KerasDistError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "reason": reason,
        "resolver": None if resolver is None else type(resolver).__name__,
        "workers": 1 if cluster is None else cluster.num_workers,
        "index": 0 if cluster is None else cluster.index,
    }


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Returns what a `RowResult` has of a job."""
    given = request["arguments"]
    try:
        result = _JOBS[request["job"]](**given)
    except Exception as error:
        traceback.print_exc()
        is_own = given.get("model", OWN_MODEL) == OWN_MODEL
        is_refused = isinstance(error, UnsupportedModelError) and not is_own
        if is_refused and given.get("kind") == "sharded":
            # The state of some optimizers can't be sharded.
            return {
                "status": Status.SKIPPED,
                "details": str(error),
                "fix": "leave it mirrored",
            }
        fix = LONGER if isinstance(error, TimeoutError) else REPORT
        if isinstance(error, KerasDistError):
            fix = "do what the message says"
        details = f"{type(error).__name__}: {error}"
        return {"status": Status.FAILED, "details": details, "fix": fix}
    if isinstance(result, str):
        return {"status": Status.PASSED, "details": result}
    return _answer_with(result)


def _answer_with(report: Report) -> dict[str, Any]:
    """Returns the answer with a report: the numbers are the same, or not."""
    answer: dict[str, Any] = {"report": report.to_dict()}
    details = f"the numbers differ: {report.first}"
    if report.same:
        if report.not_finite is None:
            passed = {"status": Status.PASSED, "details": report.verdict}
            return answer | passed
        # The same on both sides proves nothing.
        details = f"not a number, which can't be compared: {report.not_finite}"
    return answer | {
        "status": Status.FAILED,
        "details": details,
        "fix": "see below",
        "last_lines": str(report),
    }


def make_strategy(kind: str, devices: Sequence[str]) -> Strategy:
    if kind == "one":
        return OneDeviceStrategy(devices[0])
    if kind == "central":
        return CentralStorageStrategy(devices)
    if kind == "variables":
        return MirroredStrategy(devices, variables="sharded")
    return MirroredStrategy(devices, optimizer_state=kind)


def verify(model: str, kind: str, devices: Sequence[str]) -> Report:
    """Compares a model on devices of this process with one device."""
    return _verified(model, make_strategy(kind, devices))


def verify_workers(
    model: str, workers: int, devices: int | None, timeout: float
) -> Report:
    """Compares a model over several processes with one device in each."""
    reports: list[Report] = launch(
        _as_worker, (model,), workers=workers, devices=devices, timeout=timeout
    )
    return reports[0]  # each worker has the same


def _as_worker(model: str) -> Report:
    return _verified(model, MultiWorkerMirroredStrategy())


def _verified(spec: str, strategy: Strategy) -> Report:
    try:
        function = function_of(spec)
        keras.utils.set_random_seed(0)
        given = called(spec, function)
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error
    if not isinstance(given, tuple) or not 2 <= len(given) <= 4:
        raise UnsupportedModelError(
            f"--model {spec}: the function has to return a compiled model and "
            f"data to train it with. Received: {given!r}. Expected: (model, "
            "x, y), (model, x, y, sample_weight), or (model, dataset)."
        )
    names = ("x", "y", "sample_weight")
    data = dict(zip(names, given[1:], strict=False))
    return strategy.verify(function, **data)


def check_collectives(devices: Sequence[str]) -> str:
    """Checks collectives on the devices, and returns their names."""
    strategy = MirroredStrategy(devices)
    count = len(devices)
    rows = np.arange(2 * count + 1, dtype="float32")
    dataset = strategy.experimental_distribute_dataset([rows])
    batch = next(iter(dataset))

    def replica_fn(x: object) -> Any:
        context = get_replica_context()
        assert context is not None
        replica = float(context.replica_id_in_sync_group)
        ids = keras.ops.convert_to_tensor(replica, "float32")
        return ids, context.all_reduce("SUM", keras.ops.sum(x)), x

    ids, total, again = strategy.run(replica_fn, args=(batch,))
    ranks = np.arange(count)
    local, reduce = strategy.experimental_local_results, strategy.reduce
    _check("run", local(ids), ranks)
    _check("all_reduce", local(total), [rows.sum()] * count)
    _check("reduce SUM", [reduce("SUM", ids, axis=None)], [ranks.sum()])
    _check("reduce MEAN", [reduce("MEAN", ids, axis=None)], [ranks.mean()])
    _check("reduce over rows", [reduce("MEAN", again, axis=0)], [rows.mean()])
    gathered = keras.ops.convert_to_numpy(strategy.gather(again, axis=0))
    _check("gather", list(gathered), list(rows))
    return "run, all_reduce, reduce and gather"


def _check(what: str, actual: Sequence[Any], expected: Any) -> None:
    numbers = [float(keras.ops.convert_to_numpy(value)) for value in actual]
    wanted = [float(value) for value in expected]
    if len(numbers) != len(wanted) or not np.allclose(numbers, wanted):
        raise AssertionError(f"`{what}` gave {numbers}. Expected: {wanted}.")


_JOBS: dict[str, Callable[..., str | Report]] = {
    "collectives": check_collectives,
    "verify": verify,
    "verify workers": verify_workers,
}

if __name__ == "__main__":
    main(int(sys.argv[1]))
