"""Runs each of a model's three steps once for each replica.

`train_step`, `test_step` and `predict_step` on the instance take the global
batch, run the class' own step (also a user's) on each replica's rows, and
return what one device would have returned. The rest of the trainer is Keras'.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING
from typing import Any

import keras

from keras_dist.errors import UnsupportedModelError
from keras_dist.fit import hooks
from keras_dist.fit.binding import binding_of
from keras_dist.fit.coupling import watched
from keras_dist.fit.rehearsal import Rehearsal
from keras_dist.fit.updates import finish
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.replica import StepRunner
from keras_dist.replica.kinds import Kinds
from keras_dist.replica.state import ReplicaStep

if TYPE_CHECKING:
    from keras_dist.replica.strategy_core import StrategyBase

STEPS = ("train_step", "test_step", "predict_step")


def step_overrides(
    model: keras.Model, runner: StepRunner
) -> dict[str, Callable[..., Any]]:
    """Returns the instance attributes that run a model's steps on replicas.

    Args:
        model: A `keras.Model`.
        runner: The executor's `StepRunner`.

    Returns:
        Dict with `train_step`, `test_step` and `predict_step`.
    """
    hooks.install()
    kinds = Kinds(model)

    rehearsal: list[Rehearsal] = []

    def rehearse(data: Any) -> None:
        if not rehearsal:
            rehearsal.append(Rehearsal(model, runner, _strategy_of(model)))
        rehearsal[0].look(data)

    def step(name: str) -> Callable[[Any], Any]:
        def replicated(data: Any) -> Any:
            if name == "train_step":
                rehearse(data)
            # Cleared once for all replicas, which share the layers' lists of
            # losses.
            model._clear_losses()
            return _run(model, name, runner, kinds, data)

        replicated.__name__ = name
        return replicated

    return {name: step(name) for name in STEPS}


def check_layers(model: keras.Model) -> None:
    """Refuses layers that keep a state for each row of the batch.

    Raises:
        UnsupportedModelError: If there is one.
    """
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False) is True:
            raise UnsupportedModelError(
                f"Layer '{layer.name}' has stateful=True: it keeps a state "
                "for each row of the batch, and replicas have rows of their "
                "own. Expected: stateful=False. Or use one device."
            )


def _strategy_of(model: keras.Model) -> "StrategyBase":
    binding = binding_of(model)
    assert binding is not None
    return binding.strategy


def _run(
    model: keras.Model, name: str, runner: StepRunner, kinds: Kinds, data: Any
) -> Any:
    strategy = _strategy_of(model)
    method = getattr(type(model), name)

    def on_replica(replica: Replica, part: Any) -> Any:
        with ReplicaStep(replica, runner, strategy, kinds) as step:
            is_predicting = name == "predict_step"
            step.counts_losses = not is_predicting
            watch = watched if kinds.is_first(name) else nullcontext
            with watch(step):
                result = method(model, part)
            return finish(step, result, join_rows=is_predicting)

    return runner.run(on_replica, data)[0]
