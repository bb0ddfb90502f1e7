"""`verify`, which runs both copies of a model and reports the differences."""

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist.core import context
from keras_dist.fit import hooks
from keras_dist.fit.plain_models import alone_on_purpose
from keras_dist.internals import keras_internals
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.randomness import random_state
from keras_dist.plugin.randomness import set_random_state
from keras_dist.verification.batches import Batch
from keras_dist.verification.batches import batches_of
from keras_dist.verification.pair import pair_of
from keras_dist.verification.report import Report
from keras_dist.verification.trial import Trial

if TYPE_CHECKING:
    from keras_dist.plugin.workers import Workers
    from keras_dist.replica.strategy_core import StrategyBase


def verify(
    strategy: "StrategyBase",
    model: Any,
    x: Any,
    y: Any,
    sample_weight: Any,
    class_weight: Any,
    batch_size: int | None,
    steps: int,
) -> Report:
    """Compares training under a strategy with training on one device.

    Arguments are those of `Strategy.verify`.

    Raises:
        RuntimeError: If it is called inside of a `strategy.scope()`.
    """
    if context.has_strategy() or context.in_replica_function():
        raise RuntimeError(
            "`verify` trains without a strategy, too. Received: a call inside "
            f"of the scope of {context.current_strategy()!r}. Call it after "
            "the `with strategy.scope()`."
        )
    batches = batches_of(
        x,
        y,
        sample_weight,
        class_weight,
        batch_size,
        steps,
        strategy.num_replicas_in_sync,
    )
    # Hooks that were installed during the trial would be undone with its
    # temporary replacements of Keras' methods.
    hooks.install()
    with _everything_put_back(), alone_on_purpose():
        report = _run(strategy, model, batches)
    return _agreed(report, strategy.executor.workers)


def _run(strategy: "StrategyBase", model: Any, batches: list[Batch]) -> Report:
    pair = pair_of(strategy, model, batches[0])
    trial = Trial(pair, batches)
    found = trial.run()
    name = model.name if isinstance(model, keras.Model) else None
    return Report(
        name or pair.own.model.name,
        repr(strategy).strip("<>"),
        found.compared(),
        found.first,
        trial.cause(),
        found.by_layer(),
        tuple(batch.rows for batch in batches),
        tuple(trial.notes),
    )


def _agreed(report: Report, workers: "Workers | None") -> Report:
    """Returns the same report on every worker.

    It is that of the first worker whose numbers differ, or else worker 0's.
    """
    if workers is None:
        return report
    text = json.dumps(report.to_dict())
    own = np.frombuffer(text.encode(), "uint8").astype("int32")
    told = workers.concatenate_numbers([int(report.same), own.size])
    same, sizes = told[::2], told[1::2]
    first = same.index(0) if 0 in same else 0
    padded = np.zeros(max(sizes), "int32")
    padded[: own.size] = own
    everyone = workers.gather([ops.convert_to_tensor(padded)])
    numbers = np.asarray(ops.convert_to_numpy(everyone[first][0]))
    chosen = numbers[: sizes[first]].astype("uint8").tobytes().decode()
    found = Report.from_dict(json.loads(chosen))
    if first and not found.same:
        note = f"Worker {first} is the first whose numbers differ."
        found = found.with_note(note)
    return found


@contextlib.contextmanager
def _everything_put_back() -> Iterator[None]:
    """Restores the random states and the counts of names after the context."""
    backend = get_backend()
    state, names = random_state(backend), keras_internals.name_counts()
    try:
        yield
    finally:
        set_random_state(backend, state)
        keras_internals.set_name_counts(names)
