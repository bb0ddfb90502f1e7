"""Runs each of a model's three steps once for each replica.

The steps on the instance take the global batch, run the class' own on each
replica's rows, and return what one device would have returned.
"""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import keras

from keras_dist.core import nests
from keras_dist.core.rows import shape_of
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.errors import UnsupportedModelError
from keras_dist.fit import own_code
from keras_dist.fit import whole
from keras_dist.fit.metrics import flush
from keras_dist.fit.metrics import hook_metrics
from keras_dist.internals.hooks import overrides
from keras_dist.internals.keras_internals import Trainer
from keras_dist.internals.keras_random import is_seed
from keras_dist.internals.keras_saveables import all_metrics
from keras_dist.internals.keras_saveables import own_metrics
from keras_dist.plugin.executor import Executor
from keras_dist.plugin.front_end import REPLICATED
from keras_dist.plugin.front_end import STEPS
from keras_dist.plugin.front_end import is_replicated
from keras_dist.plugin.places import Places
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.runner import StepRunner
from keras_dist.replica import exchange
from keras_dist.replica.handed import Handed
from keras_dist.replica.state import ReplicaStep
from keras_dist.replica.strategy_core import StrategyBase

_COLLECT_METRICS = ("compute_metrics", "get_metrics_result")


class Steps:
    """A model's steps that run its own once for each replica.

    They are attributes of the instance. What the user puts there instead is
    taken for the model's own step.
    """

    def __init__(
        self, model: keras.Model, runner: StepRunner, strategy: StrategyBase
    ) -> None:
        # What autograd keeps of a replica must not keep the model that keeps
        # it.
        self._model = weakref.ref(model)
        self._runner = runner
        self._strategy = strategy
        self._places: dict[str, Places] = {}
        self._handed: dict[str, Handed] = {}
        self.must_build = False
        # The shapes of the last batch.
        self._shapes: list[tuple[int | None, ...]] = []
        # The user's own, of this instance.
        self._instance_steps: dict[str, Callable[[Any], Any]] = {}
        self._replicated = {name: self._step(name) for name in STEPS}
        self._run = {
            name: runner.compiled_step(
                name,
                functools.partial(self.run, name),
                functools.partial(self._is_of_keras, name),
            )
            for name in STEPS
        }

    def replace(self) -> None:
        """Sets the attributes of the instance."""
        model = self._model()
        assert model is not None
        for name, step in self._replicated.items():
            given = vars(model).get(name)
            if given is step:
                continue
            self._instance_steps.pop(name, None)
            if given is not None and not is_replicated(given):
                self._instance_steps[name] = given
            object.__setattr__(model, name, step)

    def explained(
        self, error: BaseException, rows: Callable[[], int]
    ) -> BaseException:
        """Returns an error that explains one of a step.

        `rows` returns the number of rows of a full batch.
        """
        return whole.explained(error, self._shapes, rows)

    def _recover(self) -> None:
        model = self._model()
        if model is not None:
            self._strategy.executor.recover(model)

    def _step(self, name: str) -> Callable[[Any], Any]:
        def replicated(data: object) -> Any:
            model = self._model()
            assert model is not None
            try:
                return self._run[name](model, data)
            finally:
                # TensorFlow's graph fails later.
                if self._runner.traces_steps or sys.exc_info()[1]:
                    leaves = nests.leaves_of(data)
                    self._shapes = [shape_of(leaf) for leaf in leaves]

        replicated.__name__ = name
        setattr(replicated, REPLICATED, True)
        return replicated

    def run(self, name: str, model: keras.Model, data: object) -> Any:
        """Runs a step of a model, once for each replica."""
        self._runner.build(model, name, data)
        if self.must_build and not self._runner.traces_steps:
            # A callback has called `compile`.
            self.must_build = False
            model._symbolic_build(data_batch=data)
        # Cleared once for all replicas, which share the layers' lists of
        # losses.
        model._clear_losses()
        if name not in self._places:
            draws = any(map(is_seed, model.variables))
            rows_only = own_code.hands_rows_only(model)
            is_open = draws or not rows_only
            self._places[name] = Places(draws, is_open, self._recover)
            self._handed[name] = Handed(rows_only)
        places, handed = self._places[name], self._handed[name]
        workers, options = self._strategy.executor.workers, {}
        if self._runner.looks_at_draws:
            options["places"] = places
        recorded: contextlib.AbstractContextManager[None] = nullcontext()
        if workers is not None and not self._runner.traces_steps:
            recorded = workers.step(f"`{name}`")
        with recorded:
            on_replica = self._on_replica(model, name, handed)
            result = self._runner.run(on_replica, data, **options)[0]
        if handed.is_unsure:
            # The next step is split unevenly again.
            places.is_open, handed.is_unsure = True, False
        return result

    def _is_of_keras(self, name: str, model: keras.Model) -> bool:
        """Returns whether no code of the user's is in a step, but layers,
        losses and metrics."""
        return (
            name not in self._instance_steps
            and not overrides(type(model), name)
            and _has_own_metrics(model)
        )

    def _on_replica(
        self, model: keras.Model, name: str, handed: Handed
    ) -> Callable[[Replica, Any], Any]:
        instance_step = self._instance_steps.get(name)
        method = instance_step or functools.partial(
            getattr(type(model), name), model
        )
        is_of_keras = self._is_of_keras(name, model)
        is_predicting = name == "predict_step"

        def on_replica(replica: Replica, part: object) -> Any:
            with ReplicaStep(
                replica, self._runner, self._strategy, model, handed
            ) as step:
                step.counts_losses = not is_predicting
                step.ends_with_metrics = is_of_keras
                return _finish(step, method(part), join_rows=is_predicting)

        return on_replica


def prepare_steps(model: keras.Model, is_new: bool) -> None:
    """Hooks a model's metrics; refuses layers with a state for each row.

    Metrics that the model does not track are looked for if it `is_new`: that
    takes long.
    """
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False) is True:
            raise UnsupportedModelError(
                f"Layer '{layer.name}' has stateful=True: it keeps a state "
                "for each row of the batch, but each replica has only its "
                "own rows. Expected: stateful=False. Or use one device."
            )
    hook_metrics(all_metrics(model) if is_new else own_metrics(model))


def _has_own_metrics(model: keras.Model) -> bool:
    """Returns whether Keras' own code collects a model's metrics."""
    cls = type(model)
    return (
        cls.metrics is Trainer.metrics
        and cls.compute_metrics is Trainer.compute_metrics
        and cls.get_metrics_result is Trainer.get_metrics_result
        and vars(model).keys().isdisjoint(_COLLECT_METRICS)
    )


def _finish(step: ReplicaStep, result: object, join_rows: bool) -> Any:
    """Ends a step: commits assignments, if metrics have not, and joins rows or
    averages logs."""
    flush(step)
    if not step.has_ended:
        step.replica.check_values(step.model, step.scope.state_mapping)
    known = [id(leaf) in step.results for leaf in nests.leaves_of(result)]
    is_alike = not (join_rows or step.writes) and all(known)
    if is_alike and (step.replica.is_only or step.has_ended):
        return result  # the same on all replicas

    def end(everyone: list[Any]) -> Any:
        leaves, shares, writes = zip(*everyone, strict=True)
        step.commit(writes, shares)
        if join_rows:
            return _joined_rows(step, result, leaves, shares)
        places = [i for i, is_known in enumerate(known) if not is_known]
        values = _with_joined(step, "log ", result, places, leaves, shares)
        return nests.pack(result, values)

    local_entry = (exchange.detached(result), step.share, step.writes)
    return step.replica.rendezvous("the end of the step", end, local_entry)


def _joined_rows(
    step: ReplicaStep, result: Any, leaves: Sequence[Any], shares: Any
) -> Any:
    """Returns a prediction: the rows of all replicas; numbers as in logs."""
    everyone = list(zip(leaves, shares, strict=True))
    have_rows = step.have_rows("the prediction", everyone)
    with_rows = [i for i, has_rows in enumerate(have_rows) if has_rows]
    exchanged = step.exchange(
        [
            ([replica_leaves[i] for i in with_rows], share)
            for replica_leaves, share in everyone
        ]
    )
    rows = exchange.join_leaves(
        [replica_leaves for replica_leaves, _ in exchanged],
        [share for _, share in exchanged],
        exchange.mean_over_rows,
    )
    rest = [i for i, has_rows in enumerate(have_rows) if not has_rows]
    merged = _with_joined(step, "prediction", result, rest, leaves, shares)
    for place, value in zip(with_rows, rows, strict=True):
        merged[place] = value
    return nests.pack(result, merged)


def _with_joined(
    step: ReplicaStep,
    what: str,
    result: Any,
    places: Sequence[int],
    leaves: Sequence[Any],
    shares: Any,
) -> list[Any]:
    """Returns the first replica's leaves; at some places, those of all."""
    values = list(leaves[0])
    if places:
        names = [path for path, _ in nests.named_leaves(result)]
        given = {
            f"the {what}{names[i]}": (
                [replica_leaves[i] for replica_leaves in leaves],
                shares,
            )
            for i in places
        }
        joined_values = _joined(step.strategy.executor, given)
        for place, value in zip(places, joined_values, strict=True):
            values[place] = value
    return values


def _joined(
    executor: Executor, given: Mapping[str, exchange.Column]
) -> list[Any]:
    """Returns means over rows of floats; other values have to be equal."""
    means, equal = {}, {}
    for name, column in given.items():
        first = column[0][0]
        if not exchange.is_row_shaped(first) and exchange.is_float(first):
            means[name] = column
        elif isinstance(first, int) or hasattr(first, "dtype"):
            equal[name] = column
            shapes = {tuple(getattr(x, "shape", ())) for x in column[0]}
            if len(shapes) > 1 or None in min(shapes):
                raise _apart(name, first)

    def error(place: int) -> Exception:
        name = list(equal)[place]
        return _apart(name, equal[name][0][0])

    agreed = exchange.agreed(list(equal.values()), executor, error)
    results = dict(zip(equal, agreed, strict=True))
    averages = exchange.means(list(means.values()), executor.workers)
    results |= zip(means, averages, strict=True)
    return [results.get(name, values[0]) for name, (values, _) in given.items()]


def _apart(name: str, value: object) -> ReplicaDivergenceError:
    shape = tuple(getattr(value, "shape", ()))
    dtype = getattr(value, "dtype", type(value).__name__)
    error = ReplicaDivergenceError(
        f"A step returned {name}, which is neither rows nor a float, and "
        "differs between the replicas: each has only its own rows. Received: "
        f"shape {shape}, dtype {dtype}. Expected in logs: a mean over rows as "
        "a float, the `result()` of a `keras.metrics.Metric`, or the same "
        "value on each replica, such as `keras_dist.sum_over_rows(x)`."
    )
    error.about = "metric", name
    return error
