"""Runs each of a model's three steps once for each replica.

The steps on the instance take the global batch, run the class' own on each
replica's rows, and return what one device would have returned.
"""

import contextlib
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras

from keras_dist.core import nests
from keras_dist.errors import UnsupportedModelError
from keras_dist.fit import hooks
from keras_dist.fit.coupling import watched
from keras_dist.fit.draws import drawing_hooks
from keras_dist.fit.metrics import flush
from keras_dist.fit.metrics import hook_metrics
from keras_dist.fit.rehearsal import Rehearsal
from keras_dist.internals.keras_internals import Trainer
from keras_dist.internals.keras_random import is_seed
from keras_dist.internals.keras_saveables import all_metrics
from keras_dist.internals.keras_saveables import own_metrics
from keras_dist.internals.overrides import overrides
from keras_dist.plugin.front_end import STEPS
from keras_dist.plugin.places import Places
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.runner import StepRunner
from keras_dist.replica import exchange
from keras_dist.replica.kinds import Kinds
from keras_dist.replica.state import ReplicaStep
from keras_dist.replica.strategy_core import StrategyBase

_COLLECT_METRICS = ("compute_metrics", "get_metrics_result")


def step_overrides(
    model: keras.Model, runner: StepRunner, strategy: StrategyBase
) -> dict[str, Callable[..., Any]]:
    """Returns the instance attributes that run a model's steps on replicas."""
    hooks.install()
    kinds = Kinds(model)
    rehearsal = Rehearsal(model, runner, strategy)
    places: dict[str, Places] = {}
    # What autograd keeps of a replica must not keep the model that keeps it.
    model_of_places = weakref.ref(model)

    def recover() -> None:
        its = model_of_places()
        if its is not None:
            strategy.executor.recover(its)

    def step(name: str) -> Callable[[Any], Any]:
        def replicated(data: Any) -> Any:
            runner.build(model, name, data)
            if name == "train_step":
                rehearsal.look(data)
            # Cleared once for all replicas, which share the layers' lists of
            # losses.
            model._clear_losses()
            options = {}
            if runner.looks_at_draws:
                if name not in places:
                    draws = any(map(is_seed, model.variables))
                    places[name] = Places(draws, recover)
                options["places"] = places[name]
            return _run(model, name, runner, strategy, kinds, data, options)

        replicated.__name__ = name
        return replicated

    return {name: step(name) for name in STEPS}


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


def _run(
    model: keras.Model,
    name: str,
    runner: StepRunner,
    strategy: StrategyBase,
    kinds: Kinds,
    data: Any,
    options: dict[str, Any],
) -> Any:
    method = getattr(type(model), name)
    is_of_keras = not overrides(type(model), name) and _has_own_metrics(model)

    def on_replica(replica: Replica, part: Any) -> Any:
        with ReplicaStep(replica, runner, strategy, kinds) as step:
            is_predicting = name == "predict_step"
            step.counts_losses = not is_predicting
            step.ends_with_metrics = is_of_keras
            watch = watched if kinds.is_first(name) else nullcontext
            with watch(step):
                result = method(model, part)
            return _finish(step, result, join_rows=is_predicting)

    workers = strategy.executor.workers
    recorded: contextlib.AbstractContextManager[None] = nullcontext()
    if workers is not None and not runner.traces_steps:
        recorded = workers.step(f"`{name}`")
    with recorded, drawing_hooks():
        return runner.run(on_replica, data, **options)[0]


def _has_own_metrics(model: keras.Model) -> bool:
    """Returns whether Keras' own code collects a model's metrics."""
    cls = type(model)
    return (
        cls.metrics is Trainer.metrics
        and cls.compute_metrics is Trainer.compute_metrics
        and cls.get_metrics_result is Trainer.get_metrics_result
        and vars(model).keys().isdisjoint(_COLLECT_METRICS)
    )


def _finish(step: ReplicaStep, result: Any, join_rows: bool) -> Any:
    """Ends a step: commits assignments, and joins rows or averages logs."""
    flush(step)
    known = [id(leaf) in step.results for leaf in nests.flatten(result)]
    if step.replica.is_only and not (join_rows or step.writes) and all(known):
        return result  # the same on all workers

    def end(everyone: list[Any]) -> Any:
        leaves, shares, writes = zip(*everyone, strict=True)
        step.commit(writes, shares)
        if join_rows:
            each = step.exchange(list(zip(leaves, shares, strict=True)))
            return exchange.join(result, each, exchange.mean_over_rows)
        logs = [list(values) for values in zip(*leaves, strict=True)]
        unknown = [
            index
            for index, values in enumerate(logs)
            if not known[index] and not exchange.is_row_shaped(values[0])
        ]
        means = step.means([(logs[i], list(shares)) for i in unknown])
        found = dict(zip(unknown, means, strict=True))
        return nests.pack(
            result, [found.get(i, values[0]) for i, values in enumerate(logs)]
        )

    own = (exchange.detached(result), step.share, step.writes)
    return step.replica.meet("the end of the step", end, own)
