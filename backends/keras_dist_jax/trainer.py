"""Replacements for methods of one model, which run its steps by `Running`."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras

from keras_dist.errors import UnsupportedModelError
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.layout import StepFn
from keras_dist_jax.running import Running
from keras_dist_jax.stateful import stateless
from keras_dist_jax.steps import FitStep
from keras_dist_jax.steps import all_values
from keras_dist_jax.steps import changed_values

_MADE_HERE = (
    "make_train_function",
    "make_test_function",
    "make_predict_function",
)


class Trainer:
    """The methods of a model that Keras' trainer calls, on a layout.

    The rest of the trainer, `fit` and its relatives, is Keras' own; so are the
    steps, unless the user wrote them. `shard` makes a training step of sharded
    state from one of a model; it is `None` if each device has all of the state.
    """

    def __init__(
        self,
        running: Running,
        shard: Callable[[keras.Model, StepFn], StepFn] | None = None,
    ) -> None:
        self._running = running
        self._shard = shard

    def replacements(self) -> Mapping[str, Callable[..., Any]]:
        """Returns the methods by name.

        Raises:
            UnsupportedModelError: If the model's class overrides one of those
                that make Keras' functions.
        """
        for name in _MADE_HERE:
            cls = type(self._running.model)
            if getattr(cls, name) is not getattr(keras.Model, name):
                raise UnsupportedModelError(
                    f"{cls.__name__} has its own `{name}`, which a strategy "
                    "on JAX has to write itself. Expected: Keras' own. "
                    "Override `train_step`, `test_step` or `predict_step`, "
                    "or make the model outside of the scope."
                )
        return {
            "make_train_function": self.make_train_function,
            "make_test_function": self.make_test_function,
            "make_predict_function": self.make_predict_function,
            "jax_state_sync": self._running.sync,
            "reset_metrics": self.reset_metrics,
            "_get_jax_state": self.get_state,
        }

    def make_train_function(self, force: bool = False) -> None:
        """Replaces Keras' `make_train_function`."""
        model = self._running.model
        if model.train_function is None or force:
            step = self._step(stateless(model, "train_step"), trains=True)
            model.train_function = internals.loop_of(model, step)

    def make_test_function(self, force: bool = False) -> None:
        """Replaces Keras' `make_test_function`."""
        model = self._running.model
        if model.test_function is None or force:
            step = self._step(stateless(model, "test_step"))
            model.test_function = internals.loop_of(model, step)

    def make_predict_function(self, force: bool = False) -> Any:
        """Replaces Keras' `make_predict_function`."""
        model = self._running.model
        if model.predict_function is None or force:
            # Keras concatenates the outputs of several steps on the devices.
            step = self._step(
                stateless(model, "predict_step"),
                gather=model.steps_per_execution > 1,
            )
            model.predict_function = internals.loop_of(
                model, step, concatenate=True
            )
        return model.predict_function

    def reset_metrics(self) -> None:
        """Replaces Keras' `reset_metrics`, which begins each epoch of `fit`."""
        self._running.forget_epoch()
        internals.original(self._running.model, "reset_metrics")()

    def get_state(
        self, purge_model_variables: bool = False, **groups: bool
    ) -> Any:
        """Replaces Keras' `_get_jax_state`."""
        names = [n for n in internals.STATE_GROUPS if groups.get(n)]
        trains = "optimizer_variables" in names
        return self._running.begin(
            names,
            take_away=purge_model_variables,
            donate=purge_model_variables
            and trains
            and internals.compiles(self._running.model),
        )

    def _step(
        self, fn: StepFn, trains: bool = False, gather: bool = False
    ) -> FitStep:
        running = self._running
        layout, failures = running.layout, running.failures
        is_sharded = trains and self._shard is not None
        if trains and self._shard is not None:
            fn = self._shard(running.model, fn)
        keep = changed_values(fn)
        if not internals.compiles(running.model):
            return FitStep(running, layout.eager(keep), eager=True)
        return FitStep(
            running,
            layout.compile(
                keep, failures, gather=gather, is_sharded=is_sharded
            ),
            layout.compile(
                all_values(fn), failures, donate=True, is_sharded=is_sharded
            )
            if trains
            else None,
        )
