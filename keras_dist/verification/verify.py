"""`verify`: runs both copies of a model and reports the differences."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import keras
import numpy as np

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
from keras_dist.verification.report import Cause
from keras_dist.verification.report import Difference
from keras_dist.verification.report import Report
from keras_dist.verification.runs import Copy
from keras_dist.verification.runs import RecordedStep
from keras_dist.verification.runs import copies_of


def verify(
    strategy: StrategyBase,
    model: keras.Model,
    x: object,
    y: object,
    sample_weight: object,
    class_weight: object,
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
        trial = Trial(
            strategy, *copies_of(strategy, model, batches[0]), batches
        )
        report = trial.report(getattr(model, "name", None))
    report = _agreed(report, strategy.executor.workers)
    if report.same and isinstance(model, keras.Model):
        own_code.found_equal(model)
    return report


def _agreed(report: Report, workers: Workers | None) -> Report:
    """Returns the report of the first worker that differs, on every worker."""
    if workers is None:
        return report
    texts = workers.texts(json.dumps(report.to_dict()))
    reports = [Report.from_dict(json.loads(text)) for text in texts]
    first = next(
        (
            i
            for i, worker_report in enumerate(reports)
            if not worker_report.same
        ),
        0,
    )
    if not first:
        return reports[0]
    note = f"Worker {first} is the first whose numbers differ."
    return replace(reports[first], notes=(*reports[first].notes, note))


class Trial:
    """The steps of both copies, one phase after another."""

    def __init__(
        self,
        strategy: StrategyBase,
        reference: Copy,
        other: Copy,
        batches: list[Batch],
    ) -> None:
        self._strategy = strategy
        self._reference, self._other = reference, other
        self._parts = strategy.num_replicas_in_sync
        self._batches = batches
        self._tolerance = compare.Tolerance.of(reference.model)
        self._differences: list[Difference] = []
        self._phase = "predict"
        # Names of variables whose gradients are rounding.
        self._still: set[str] = set()
        self._notes: list[str] = []

    def report(self, name: str | None) -> Report:
        """Runs all phases, and returns what they gave."""
        if self._parts > 1 and not self._uneven:
            self._notes.append(
                "Every batch had the same number of rows for each of "
                f"{self._parts} replicas: uneven batches were not compared."
            )
        try:
            self._without_training("predict")
            self._without_training("evaluate")
            self._training(self._gradients())
        except ReplicaDivergenceError as error:
            if error.about is None:
                raise
            rows, nan = self._batches[0].rows, np.nan
            self._differences.append(
                Difference(
                    *error.about, self._phase, 0, rows, nan, nan, np.inf, 0.0
                )
            )
            self._notes.append(str(error))
        report = Report(
            name or self._reference.model.name,
            repr(self._strategy).strip("<>"),
            _most_telling(self._differences),
            None,
            tuple(batch.rows for batch in self._batches),
            tuple(self._notes),
        )
        if report.first is None:
            return report
        return replace(report, cause=self._cause(report.first))

    @property
    def _uneven(self) -> list[int]:
        return [
            index
            for index, batch in enumerate(self._batches)
            if batch.rows % self._parts
        ]

    def _compare(
        self,
        reference: RecordedStep,
        other: RecordedStep,
        noisy: RecordedStep | None,
    ) -> None:
        """Notes how a step differs, but for what rounding trains."""
        # An optimizer may divide rounding errors by themselves.
        self._differences += [
            difference
            for difference in compare.compare(
                reference, other, noisy, self._tolerance
            )
            if not compare.is_of(
                (difference.kind, difference.name), self._still
            )
        ]

    def _without_training(self, name: str) -> None:
        self._phase = name
        # An uneven batch, if there is one.
        index = next(iter(self._uneven), min(1, len(self._batches) - 1))
        batch = self._batches[index]
        try:
            reference = getattr(self._reference, name)(batch, index)
        except Exception as error:
            message = " ".join(str(error).split())[:200]
            self._notes.append(
                f"`{name}` was not compared: on one device, it raised "
                f"{type(error).__name__}: {message}."
            )
            return
        noisy = None
        if name == "evaluate" and (turned := batch.reordered()) is not None:
            noisy = self._reference.evaluate(turned, index)
        self._compare(
            reference, getattr(self._other, name)(batch, index), noisy
        )

    def _gradients(self) -> bool:
        """Compares first steps; returns false if the order of rows matters."""
        self._phase = "gradients"
        reference, keeps_order, still = self._reference, True, []
        with reference.recording(), self._other.recording():
            for index, batch in enumerate(self._batches):
                step, noisy = reference.gradients(batch, index), None
                still.append(compare.without_gradient(step))
                if (turned := batch.reordered()) is not None:
                    noisy = reference.gradients(turned, index)
                    keeps_order &= not compare.depends_on_order(step, noisy)
                self._compare(step, self._other.gradients(batch, index), noisy)
        self._still = set.intersection(*still)
        if self._still:
            self._notes.append(
                "Gradients that are 0, but for rounding: those of "
                f"{', '.join(sorted(self._still))}. What training makes of "
                "them was not compared."
            )
        if not keeps_order:
            self._notes.append(
                "On one device alone, another order of the rows gives other "
                "gradients: the model depends on the order of rows."
            )
        return keeps_order

    def _training(self, keeps_order: bool) -> None:
        self._phase = "training"
        reference = self._reference.train(self._batches)
        noisy: list[RecordedStep | None] = [None] * len(reference)
        turned = [batch.reordered() for batch in self._batches]
        known = [batch for batch in turned if batch is not None]
        if keeps_order and len(known) == len(turned):
            noisy = [*self._reference.train(known)]
        other = self._other.train(self._batches)
        for steps in zip(reference, other, noisy, strict=True):
            self._compare(*steps)
        if all(batch.class_weight is None for batch in self._batches):
            self._phase = "fit"
            reference_fit = self._reference.fit(self._batches)
            self._compare(
                reference_fit, self._other.fit(self._batches), noisy[-1]
            )

    def _cause(self, first: Difference) -> Cause:
        """Returns the likely cause of a difference, after more steps alone."""
        reference, batch = self._reference, self._batches[first.step]
        doubles = None
        with reference.recording():
            once, again = (reference.gradients(batch, 0) for _ in range(2))
            differences = compare.compare(once, again, None, self._tolerance)
            run = {
                "evaluate": reference.evaluate,
                "gradients": reference.gradients,
            }
            if first.phase in run and (twice := batch.twice()) is not None:
                once, again = (run[first.phase](b, 0) for b in (batch, twice))
                doubles = compare.doubles(once, again, (first.kind, first.name))
        return cause_of(
            first,
            reference.model,
            any(difference.differs for difference in differences),
            doubles,
            self._parts > 1 and self._strategy.executor.sees_all_rows,
            own_code.adding(reference.model),
        )


def _most_telling(differences: list[Difference]) -> tuple[Difference, ...]:
    """Returns each value's first difference, else its largest one."""
    most: dict[Any, Difference] = {}
    for difference in differences:
        key = (difference.phase, difference.kind, difference.name)
        if key not in most or _weight(difference) > _weight(most[key]):
            most[key] = difference
    return tuple(most.values())


def _weight(difference: Difference) -> tuple[bool, bool, float]:
    """Returns a sort key: the largest one is kept, the first of equal ones."""
    if difference.differs:
        return True, False, 0.0
    return False, bool(np.isnan(difference.strategy)), difference.relative
