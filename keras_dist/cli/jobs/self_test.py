"""The process of one backend, which describes itself and then does jobs.

The argument is a file descriptor for replies, a line of JSON each. The first
reply describes the backend and its devices; the others answer the lines of JSON
on standard input.
"""

import hashlib
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np

from keras_dist.cli.jobs import digits
from keras_dist.cli.trial import OWN_MODEL
from keras_dist.cluster_resolver import detect
from keras_dist.cluster_resolver.tasks import cluster_of
from keras_dist.errors import KerasDistError
from keras_dist.errors import UnsupportedModelError
from keras_dist.launch.function import launch
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.backend import list_devices
from keras_dist.plugin.membership import alone_on_purpose
from keras_dist.plugin.powers import shards_on_devices
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

# Another order of float32 sums changes weights by a few 1e-7 here.
_TOLERANCE = 1e-5


class DifferentNumbersError(Exception):
    """Raised when numbers are not those that they should be."""


class RefusedError(Exception):
    """Raised when the state of a user's optimizer can't be sharded."""


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
    try:
        found = _JOBS[request["job"]](**request["arguments"])
        return _told(found) if isinstance(found, Report) else {"found": found}
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, RefusedError):
            return {"refused": str(error)}
        name = f"{type(error).__name__}: "
        if isinstance(error, DifferentNumbersError):
            name = ""
        return {
            "error": f"{name}{error}",
            # The messages of these errors say what to do.
            "is_ours": isinstance(error, KerasDistError),
            "is_late": isinstance(error, TimeoutError),
        }


def _told(report: Report) -> dict[str, Any]:
    """Returns the answer with a report: the numbers are the same, or not."""
    answer: dict[str, Any] = {"report": report.to_dict()}
    problem = f"the numbers differ: {report.first}"
    if report.same:
        # NaN or infinity on both sides is the same, and proves nothing.
        lost = [d for d in report.differences if not math.isfinite(d.strategy)]
        if not lost:
            return {**answer, "found": report.verdict}
        problem = f"not a number, which can't be compared: {lost[0]}"
    return {
        **answer,
        "error": problem,
        "text": str(report),
        "is_ours": True,
        "is_late": False,
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
    try:
        return _verified(model, lambda: make_strategy(kind, devices))[0]
    except UnsupportedModelError as error:
        if kind == "sharded" and model != OWN_MODEL:
            raise RefusedError(str(error)) from error
        raise


def verify_workers(
    model: str, workers: int, devices: int | None, timeout: float
) -> Report:
    """Compares a model over several processes with one device in each."""
    found: list[tuple[Report, str]] = launch(
        _as_worker, (model,), workers=workers, devices=devices, timeout=timeout
    )
    check_alike([digest for _, digest in found])
    return found[0][0]  # each worker has the same report


def check_alike(digests: Sequence[str]) -> None:
    """Checks that all workers have the same bits in their weights."""
    for index, digest in enumerate(digests):
        if digest != digests[0]:
            raise DifferentNumbersError(
                f"worker {index} ended with different weights from worker 0. "
                "Expected: the same on each worker."
            )


def _as_worker(model: str) -> tuple[Report, str]:
    report, weights = _verified(model, MultiWorkerMirroredStrategy)
    return report, digest_of(weights)


def digest_of(weights: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(np.ascontiguousarray(weight).tobytes())
    return digest.hexdigest()


def _verified(
    spec: str, make: Callable[[], Strategy]
) -> tuple[Report, list[Any]]:
    """Returns a report, and the weights of the copy under the strategy."""
    strategy = make()
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
    _, *data = given
    names = ("x", "y", "sample_weight")
    copies = []

    def copy() -> Any:
        copies.append(function()[0])
        return copies[-1]

    report = strategy.verify(copy, **dict(zip(names, data, strict=False)))
    own, other = copies
    if spec == OWN_MODEL and report.same:
        check_fit(own, other)
    return report, other.get_weights()


def check_fit(own: keras.Model, other: keras.Model) -> None:
    """Checks a `fit` of several steps, the last one with fewer rows."""
    other.set_weights(own.get_weights())
    full, last = digits.BATCHES
    x, y = digits.rows(2 * full + last)
    for model, context in ((own, alone_on_purpose()), (other, nullcontext())):
        with context:
            model.fit(x, y, batch_size=full, shuffle=False, verbose=0)
    gap = digits.largest_difference(own.get_weights(), other.get_weights())
    # A comparison with NaN is false, so weights that blew up fail.
    if not gap <= _TOLERANCE:
        raise DifferentNumbersError(
            f"after a `fit` with batches of {full}, {full} and {last} rows, "
            f"weights differ by {gap:.1e} from those of one device. Expected: "
            f"at most {_TOLERANCE:.0e}."
        )


def check_collectives(devices: Sequence[str]) -> str:
    """Checks collectives on the devices, and returns their names."""
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
    numbers = [float(keras.ops.convert_to_numpy(each)) for each in actual]
    wanted = [float(each) for each in expected]
    if len(numbers) != len(wanted) or not np.allclose(numbers, wanted):
        raise DifferentNumbersError(
            f"`{what}` gave {numbers}. Expected: {wanted}."
        )


_JOBS: dict[str, Callable[..., str | Report]] = {
    "collectives": check_collectives,
    "verify": verify,
    "verify workers": verify_workers,
}

if __name__ == "__main__":
    main(int(sys.argv[1]))
