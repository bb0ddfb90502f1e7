"""Compares the loss of a user's own step on replicas with one device.

Replicas' gradients are summed as those of means over rows, which a user's loss
may not be. So before its first batch counts, the step runs on some rows, once
by one replica and once by all. Nothing is kept.
"""

import contextlib
import math
import warnings
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops
from keras import tree

from keras_dist.errors import see_section
from keras_dist.fit import hooks
from keras_dist.fit.draws import drawing_hooks
from keras_dist.internals.overrides import first_pass_wrapped
from keras_dist.internals.overrides import own_steps
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.randomness import kept_random_state
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.runner import StepRunner
from keras_dist.replica.kinds import Kinds
from keras_dist.replica.probe import kept_attributes
from keras_dist.replica.state import ReplicaStep
from keras_dist.replica.strategy_core import StrategyBase

_ROWS_OF_A_REPLICA = 8
_ATTEMPTS = 2
# The largest differences that count as rounding.
_RELATIVE, _OF_HALVES, _ABSOLUTE = 2e-3, 5e-2, 1e-5

# The first batch of a `fit` whose steps are traced before batches have values.
_first: "weakref.WeakKeyDictionary[keras.Model, Any]" = (
    weakref.WeakKeyDictionary()
)


class RehearsedStep(ReplicaStep):
    """A step that updates nothing and keeps assignments to itself."""

    is_rehearsal = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.targets: list[float] = []

    def write(self, variable: keras.Variable, value: Any) -> None:
        self.scope.state_mapping[id(variable)] = value

    def differentiated(self, targets: Any) -> None:
        for target in tree.flatten(targets):
            # A loss with an axis is not compared: backends weigh it correctly.
            is_number = not len(target.shape)
            value = ops.convert_to_numpy(ops.stop_gradient(target))
            self.targets.append(float(value) if is_number else math.nan)


@dataclass(frozen=True)
class _Parted:
    """A loss that differs between replicas and one device."""

    alone: float
    mean: float
    is_sum: bool
    rows: int


class Rehearsal:
    def __init__(
        self, model: keras.Model, runner: StepRunner, strategy: StrategyBase
    ) -> None:
        self._model = weakref.ref(model)
        self._runner = runner
        self._strategy = strategy
        self._attempts = _ATTEMPTS

    def look(self, data: Any) -> None:
        """Warns if losses of the first batch differ; later calls do nothing."""
        if not self._attempts:
            return
        model = self._model()
        assert model is not None
        wanted = _is_wanted(self._strategy, model)
        self._attempts = self._attempts - 1 if wanted else 0
        if not wanted:
            return
        data = _first.pop(model, None) if self._runner.traces_steps else data
        if data is None:
            return
        parted = self._parted(model, data)
        if parted is not None:
            warnings.warn(self._text(model, parted), stacklevel=2)

    def _parted(self, model: keras.Model, data: Any) -> _Parted | None:
        most = _ROWS_OF_A_REPLICA * self._strategy.plan.num_replicas
        try:
            with (
                kept_attributes(model),
                self._runner.rehearsing(),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                few = tree.map_structure(lambda leaf: _cut(leaf, most), data)
                alone = self._run(model, few, is_whole=True)
                each = self._run(model, few)
        except Exception:
            # The step itself calls the user's code next, and raises there.
            return None
        self._attempts = 0
        halves = ("float16", "bfloat16")
        is_half = any(
            x.compute_dtype in halves for x in model._flatten_layers()
        )
        relative = _OF_HALVES if is_half else _RELATIVE
        return _first_parted(alone, each, relative)

    def _run(
        self, model: keras.Model, data: Any, is_whole: bool = False
    ) -> list[RehearsedStep]:
        kinds = Kinds(model)

        def on_replica(replica: Replica, part: Any) -> RehearsedStep:
            step = RehearsedStep(replica, self._runner, self._strategy, kinds)
            with step:
                type(model).train_step(model, part)
            return step

        hooks.install_for_functions()
        model._clear_losses()
        try:
            with drawing_hooks(), kept_random_state(get_backend()):
                return self._runner.run(on_replica, data, is_whole)
        finally:
            model._clear_losses()

    def _text(self, model: keras.Model, parted: _Parted) -> str:
        name = own_steps(model)[0]
        count = self._strategy.plan.num_replicas
        if parted.is_sum:
            why = (
                "The loss is a sum over rows, and the mean of the replicas' "
                f"losses is 1/{count} of that sum. Divide the loss by the "
                "number of rows, or compute it with a Keras loss that has "
                '`reduction="sum"`.'
            )
        else:
            why = (
                "Either the loss combines different rows of a batch, and "
                "each replica has only its own rows, or a part of the loss "
                "is a sum over rows. Compute that part in a "
                "`keras.losses.Loss`, which gets the rows of all replicas. "
                "Or write means over rows, or use one device."
            )
        return (
            f"`{name}` of model '{model.name}' computes a loss that is not "
            f"the same on {count} replicas as on one device. Received: "
            f"{parted.mean:.6g} from the replicas, as the mean of their "
            f"losses over rows, and {parted.alone:.6g} from one device, for "
            f"the first {parted.rows} rows. {why} `strategy.verify(model, x, "
            "y)` compares the strategy with one device. "
            f"{see_section('The numbers differ')}"
        )


@contextlib.contextmanager
def first_batch_held(
    strategy: StrategyBase, model: keras.Model
) -> Iterator[None]:
    """Keeps the first batch of a `fit` for the rehearsal of its step."""
    executor = strategy.executor
    is_traced = isinstance(executor, StepRunner) and executor.traces_steps
    if not is_traced or not _is_wanted(strategy, model) or model in _held:
        yield
        return
    _held.add(model)

    def see(batch: Any) -> None:
        if batch is not None:
            _first[model] = batch

    waiting: list[Callable[[Any], Any]] = [
        lambda batches: executor.watch_first(batches, see)
    ]
    # `fit` reads its training data before any other.
    with first_pass_wrapped(lambda _: waiting.pop() if waiting else None):
        try:
            yield
        finally:
            _first.pop(model, None)


_held: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()


def _is_wanted(strategy: StrategyBase, model: keras.Model) -> bool:
    plan = strategy.plan
    return (
        plan.num_replicas > 1
        and strategy.executor.workers is None
        and bool(own_steps(model))
    )


def _cut(leaf: Any, most: int) -> Any:
    is_many = len(getattr(leaf, "shape", ())) and leaf.shape[0] > most
    return leaf[:most] if is_many else leaf


def _first_parted(
    alone: list[RehearsedStep],
    each: list[RehearsedStep],
    relative: float,
) -> _Parted | None:
    shares = [step.share for step in each]
    counts = {len(step.targets) for step in [alone[0], *each]}
    if len(counts) > 1:
        return None
    columns = zip(*(step.targets for step in each), strict=True)
    for one, column in zip(alone[0].targets, columns, strict=True):
        values = [
            x for x, share in zip(column, shares, strict=True) if share.rows
        ]
        weights = [share.weight for share in shares if share.rows]
        if not all(map(math.isfinite, (one, *values))):
            continue
        mean = math.fsum(w * x for w, x in zip(weights, values, strict=True))
        total = math.fsum(values)
        # Rounding is relative to the terms, which may cancel.
        size = max(map(abs, (one, *values)))
        near = relative * size + _ABSOLUTE
        if near < abs(one - mean):
            is_sum = abs(one - total) <= near
            return _Parted(one, mean, is_sum, shares[0].total)
    return None
