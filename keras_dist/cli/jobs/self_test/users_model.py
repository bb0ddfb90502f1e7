"""The trials of `keras-dist test --model`, with a user's model."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.cli.jobs.self_test.parity import make_strategy
from keras_dist.errors import UnsupportedModelError
from keras_dist.launch.function import launch
from keras_dist.strategies.strategy import Strategy
from keras_dist.tools.users_function import called
from keras_dist.tools.users_function import function_of
from keras_dist.verification.report import Report


class RefusedError(Exception):
    """Raised when the state of a user's optimizer can't be sharded."""


def verify_model(model: str, kind: str, devices: Sequence[str]) -> Report:
    """Compares a user's model on devices of this process with one device.

    `model` is `"module:function"`; the function returns a compiled model, `x`,
    and, if there are any, `y` and sample weights. `kind` is that of
    `make_strategy`.

    Raises:
        UnsupportedModelError: If the function returns something else, or its
            model is refused.
        RefusedError: If the optimizer's state can't be sharded.
    """
    try:
        return _verified(model, lambda: make_strategy(kind, devices))
    except UnsupportedModelError as error:
        if kind == "sharded":
            raise RefusedError(str(error)) from error
        raise


def verify_workers(
    model: str, workers: int, devices: int | None, timeout: float
) -> Report:
    """Compares a user's model over several processes with one device in each.

    `devices` is the number of virtual CPU devices of each process, or `None`
    for the accelerators that each gets. `timeout` is in seconds, for all of
    them.

    Raises:
        UnsupportedModelError: As for `verify_model`.
        TimeoutError: If workers still ran after `timeout`.
    """
    reports = launch(
        _as_worker, (model,), workers=workers, devices=devices, timeout=timeout
    )
    # All workers have the same report.
    return Report.from_dict(reports[0])


def _as_worker(model: str) -> dict[str, Any]:
    from keras_dist.strategies.multi_worker_mirrored import (
        MultiWorkerMirroredStrategy,
    )

    return _verified(model, MultiWorkerMirroredStrategy).to_dict()


def _verified(spec: str, make: Callable[[], Strategy]) -> Report:
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
    return strategy.verify(function, **dict(zip(names, data, strict=False)))
