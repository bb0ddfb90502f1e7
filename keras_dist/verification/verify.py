"""`verify`: runs both copies of a model and reports the differences."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist.core import context
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.fit import own_code
from keras_dist.internals import keras_internals
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.membership import alone_on_purpose
from keras_dist.plugin.randomness import kept_random_state
from keras_dist.plugin.workers import Workers
from keras_dist.replica.strategy_core import StrategyBase
from keras_dist.verification import compare
from keras_dist.verification.batches import Batch
from keras_dist.verification.batches import batches_of
from keras_dist.verification.causes import cause_of
from keras_dist.verification.report import Difference
from keras_dist.verification.report import Report
from keras_dist.verification.runs import Copy
from keras_dist.verification.runs import RecordedStep
from keras_dist.verification.runs import copies_of


def verify(
    strategy: StrategyBase,
    model: Any,
    x: Any,
    y: Any,
    sample_weight: Any,
    class_weight: Any,
    batch_size: int | None,
    steps: int,
) -> Report:
    """Compares training under a strategy with training on one device."""
    if context.has_strategy() or context.in_replica_function():
        raise RuntimeError(
            "`verify` also trains without a strategy. Received: a call "
            f"inside of the scope of {context.current_strategy()!r}. Call it "
            "after the `with strategy.scope()` block."
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
    with contextlib.ExitStack() as stack:
        counts = keras_internals.name_counts()
        stack.callback(keras_internals.set_name_counts, counts)
        stack.enter_context(strategy.executor.hooks)
        stack.enter_context(kept_random_state(get_backend()))
        stack.enter_context(alone_on_purpose())
        own, other = copies_of(strategy, model, batches[0])
        count = strategy.num_replicas_in_sync
        sees_all_rows = count > 1 and strategy.executor.sees_all_rows
        trial = Trial(own, other, count, batches, sees_all_rows)
        trial.run()
        name = model.name if isinstance(model, keras.Model) else None
        report = trial.report(
            name or own.model.name, repr(strategy).strip("<>")
        )
    report = _agreed(report, strategy.executor.workers)
    if report.same and isinstance(model, keras.Model):
        own_code.found_equal(model)
    return report


def _agreed(report: Report, workers: Workers | None) -> Report:
    """Returns the report of the first worker that differs, on every worker."""
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


class Trial:
    """The steps of both copies, one phase after another."""

    def __init__(
        self,
        own: Copy,
        other: Copy,
        num_replicas: int,
        batches: list[Batch],
        sees_all_rows: bool,
    ) -> None:
        self._own, self._other = own, other
        self._sees_all_rows = sees_all_rows
        self._num_replicas = num_replicas
        self._batches = batches
        self._tolerance = compare.Tolerance.of(own.model)
        self._found: list[Difference] = []
        self._phase = "predict"
        self._is_random = False
        self._doubles: bool | None = None
        # Names of variables whose gradients are rounding.
        self._still: set[str] = set()
        self._notes: list[str] = []

    def run(self) -> None:
        """Runs all phases, and compares their results."""
        parts = self._num_replicas
        if parts > 1 and not any(b.rows % parts for b in self._batches):
            self._notes.append(
                f"Every batch had the same number of rows for each of {parts} "
                "replicas: uneven batches were not compared."
            )
        try:
            self._without_training("predict")
            self._without_training("evaluate")
            keeps_order = self._gradients()
            self._training(keeps_order)
            self._double(self._own.evaluate, "evaluate")
        except ReplicaDivergenceError as error:
            if error.about is None:
                raise
            rows, nan = self._batches[0].rows, np.nan
            self._found.append(
                Difference(
                    *error.about, self._phase, 0, rows, nan, nan, np.inf, 0.0
                )
            )
            self._notes.append(str(error))

    def report(self, model: str, strategy: str) -> Report:
        """Returns the report on the named model and strategy."""
        first, cause = self._first, None
        if first is not None:
            own, random = self._own.model, self._is_random
            adding = own_code.adding(own)
            cause = cause_of(
                first, own, random, self._doubles, self._sees_all_rows, adding
            )
        return Report(
            model,
            strategy,
            _most_telling(self._found),
            first,
            cause,
            _by_layer(self._found),
            tuple(batch.rows for batch in self._batches),
            tuple(self._notes),
        )

    @property
    def _first(self) -> Difference | None:
        return next((each for each in self._found if each.differs), None)

    def _without_training(self, name: str) -> None:
        self._phase = name
        # An uneven batch, if there is one.
        parts = self._num_replicas
        uneven = [i for i, b in enumerate(self._batches) if b.rows % parts]
        index = uneven[0] if uneven else min(1, len(self._batches) - 1)
        batch = self._batches[index]
        try:
            own = getattr(self._own, name)(batch, index)
        except Exception as error:
            message = " ".join(str(error).split())[:200]
            self._notes.append(
                f"`{name}` was not compared: on one device, it raised "
                f"{type(error).__name__}: {message}."
            )
            return
        noisy = None
        if name == "evaluate" and (turned := batch.reordered()) is not None:
            noisy = self._own.evaluate(turned, index)
        other = getattr(self._other, name)(batch, index)
        self._found += compare.compare(own, other, noisy, self._tolerance)

    def _gradients(self) -> bool:
        """Compares first steps; returns false if the order of rows matters."""
        self._phase = "gradients"
        own, other = self._own, self._other
        kept, others = own.recorders(), other.recorders()
        keeps_order = True
        for index, batch in enumerate(self._batches):
            step = own.gradients(batch, index, kept)
            still = compare.without_gradient(step)
            self._still = self._still & still if index else still
            if not index:
                again = own.gradients(batch, index, kept)
                repeated = compare.compare(step, again, None, self._tolerance)
                self._is_random = any(each.differs for each in repeated)
            noisy = None
            if (turned := batch.reordered()) is not None:
                noisy = own.gradients(turned, index, kept)
                if compare.depends_on_order(step, noisy):
                    keeps_order = False
            theirs = other.gradients(batch, index, others)
            self._found += compare.compare(step, theirs, noisy, self._tolerance)
        self._double(lambda b, i: own.gradients(b, i, kept), "gradients")
        kept.undo()
        others.undo()
        if self._is_random:
            self._notes.append(
                "On one device alone, the same step twice gives other numbers."
            )
        if not keeps_order:
            self._notes.append(
                "On one device alone, another order of the rows gives other "
                "gradients: the model depends on the order of rows."
            )
        return keeps_order

    def _training(self, keeps_order: bool) -> None:
        self._phase = "training"
        own = self._own.train(self._batches)
        noisy: list[RecordedStep | None] = [None] * len(own)
        turned = [batch.reordered() for batch in self._batches]
        known = [batch for batch in turned if batch is not None]
        if keeps_order and len(known) == len(turned):
            noisy = [*self._own.train(known)]
        other = self._other.train(self._batches)
        for step, theirs, noise in zip(own, other, noisy, strict=True):
            # An optimizer may divide rounding errors by themselves.
            self._found += [
                each
                for each in compare.compare(
                    step, theirs, noise, self._tolerance
                )
                if not compare.is_of((each.kind, each.name), self._still)
            ]
        if self._still:
            self._notes.append(
                "Gradients that are 0, but for rounding: those of "
                f"{', '.join(sorted(self._still))}. What training makes of "
                "them was not compared."
            )

    def _double(
        self, run: Callable[[Batch, int], RecordedStep], phase: str
    ) -> None:
        """Tries if doubled rows change the value of this phase's difference."""
        first = self._first
        if self._doubles is not None or first is None or first.phase != phase:
            return
        batch = self._batches[first.step]
        key = first.kind, first.name
        if (twice := batch.twice()) is None:
            return
        once, doubled = run(batch, first.step), run(twice, first.step)
        if key not in once.found or key not in doubled.found:
            return
        before, after = compare.change(once, key), compare.change(doubled, key)
        unit = float(np.max(np.abs(before))) or 1.0
        self._doubles = bool(np.max(np.abs(after - before)) > 1e-2 * unit)


def _most_telling(found: list[Difference]) -> tuple[Difference, ...]:
    """Returns each value's first difference, else its largest one."""
    most: dict[Any, Difference] = {}
    for each in found:
        key = (each.phase, each.kind, each.name)
        if key not in most or _weight(each) > _weight(most[key]):
            most[key] = each
    return tuple(most.values())


def _weight(each: Difference) -> tuple[bool, bool, float]:
    """Returns a sort key: the largest one is kept, the first of equal ones."""
    if each.differs:
        return True, False, 0.0
    return False, bool(np.isnan(each.strategy)), each.relative


def _by_layer(found: list[Difference]) -> tuple[tuple[str, float], ...]:
    """Returns gradients that differ in the first such step, largest first."""
    wrong = [d for d in found if d.kind == "gradient" and d.differs]
    pairs = [(d.name, d.relative) for d in wrong if d.step == wrong[0].step]
    return tuple(sorted(pairs, key=lambda pair: -pair[1]))
