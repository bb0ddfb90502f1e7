"""Replacements for methods of one model, which run its steps by `Running`.

A step may be written with variables, as on other backends: `train_step(data)`;
Keras' trainer on JAX wants `train_step(state, data)`.
"""

import functools
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.errors import UnsupportedModelError
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.fit.running import FitStep
from keras_dist_jax.fit.running import Running
from keras_dist_jax.fit.running import all_values
from keras_dist_jax.fit.running import changed_values
from keras_dist_jax.placement.layout import StepFn

_GROUPS = {
    "train_step": internals.STATE_GROUPS,
    "test_step": (*internals.STATE_GROUPS[:2], "metrics_variables"),
    "predict_step": internals.STATE_GROUPS[:2],
}


def stateless(model: keras.Model, name: str) -> StepFn:
    """Returns a model's step as a function of the state and a batch."""
    method = getattr(model, name)
    if internals.takes_data_only(method):
        return _of_variables(model, name, method)
    if name != "predict_step":
        step: StepFn = method
        return step

    def predict_step(state: Any, data: Any) -> tuple[Any, Any]:
        outputs, non_trainable = method(state, data)
        return outputs, (state[0], non_trainable)

    return predict_step


def _of_variables(
    model: keras.Model, name: str, method: Callable[[Any], Any]
) -> StepFn:
    def step(state: object, data: object) -> tuple[Any, Any]:
        groups = _variables(model, name)
        _check_lengths(model, name, groups, state)
        with _StateScope(groups, state) as scope:
            outputs = method(data)
        _check_lengths(model, name, _variables(model, name), state)
        _check_assigned(name, scope, groups)
        return outputs, [[scope.value_of(v) for v in group] for group in groups]

    step.__name__ = name  # profiles show it
    return step


def _variables(model: keras.Model, name: str) -> list[list[keras.Variable]]:
    return [internals.variables_of(model, group) for group in _GROUPS[name]]


class _StateScope(keras.StatelessScope):
    """A scope that reads the state's values and keeps a step's assignments."""

    def __init__(self, groups: Any, state: Any) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        # Without Keras' conversions: a value that a step returns as it was
        # given needs no new buffer.
        for variables, values in zip(groups, state, strict=True):
            ids = map(id, variables)
            self.state_mapping.update(zip(ids, values, strict=True))
        self.assigned: dict[int, keras.Variable] = {}

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        super().add_update(update)
        self.assigned[id(update[0])] = update[0]

    def value_of(self, variable: keras.Variable) -> Any:
        return self.state_mapping[id(variable)]


def _check_lengths(
    model: keras.Model, name: str, groups: Any, state: Any
) -> None:
    got, expected = [len(g) for g in groups], [len(g) for g in state]
    if got != expected:
        known = {id(v) for group in groups for v in group}
        raise UnsupportedModelError(
            f"`{name}` of model '{model.name}' made variables while it was "
            f"traced.\nReceived: {got} variables in the groups "
            f"{list(_GROUPS[name])}. Expected: {expected} variables, "
            f"{len(known)} in all, as before the step. Build layers, "
            "optimizers and metrics before `fit`: call the model and "
            "`update_state` on a batch, `optimizer.build(variables)`, then "
            "`reset_state()`."
        )


def _check_assigned(name: str, scope: _StateScope, groups: Any) -> None:
    known = {id(variable) for group in groups for variable in group}
    for key, variable in scope.assigned.items():
        if key not in known:
            raise UnsupportedModelError(
                f"`{name}` assigned variable '{variable.path}', which is not "
                "part of the model's state, so its value would be lost on "
                f"JAX. Expected: variables in {list(_GROUPS[name])} of the "
                "model. Make its owner (a layer, a metric, an optimizer, a "
                "`keras.random.SeedGenerator`) an attribute of the model."
            )


class Trainer:
    """The methods of a model that Keras' trainer calls, on a layout."""

    def __init__(
        self,
        running: Running,
        shard: Callable[[keras.Model, StepFn, Sequence[str]], StepFn]
        | None = None,
    ) -> None:
        self.running = running
        self._shard = shard

    def replacements(self) -> Mapping[str, Callable[..., Any]]:
        makers = {
            f"make_{kind}_function": functools.partial(self._make, kind)
            for kind in ("train", "test", "predict")
        }
        cls = type(self.running.model)
        for name in makers:
            if getattr(cls, name) is not getattr(keras.Model, name):
                raise UnsupportedModelError(
                    f"{cls.__name__} overrides `{name}`, which a strategy on "
                    "JAX has to replace. Expected: Keras' own method. "
                    "Override `train_step`, `test_step` or `predict_step`, "
                    "or make the model outside of the scope."
                )
        return {
            **makers,
            **dict.fromkeys(internals.SYNCS, self.running.sync),
            "reset_metrics": self.reset_metrics,
            "_get_jax_state": self.get_state,
        }

    def _make(self, kind: str, force: bool = False) -> Any:
        """Replaces Keras' `make_train_function` and its relatives."""
        model, name = self.running.model, f"{kind}_function"
        if getattr(model, name) is None or force:
            predicts = kind == "predict"
            step = self._step(
                f"{kind}_step",
                # Keras concatenates the outputs of several steps on the
                # devices.
                gather=predicts and model.steps_per_execution > 1,
            )
            loop = internals.loop_of(model, step, concatenate=predicts)
            setattr(model, name, loop)
        return getattr(model, name)

    def _stateless(self, name: str) -> StepFn:
        """Returns a step, so that it can run on all of the layout's devices."""
        step, layout = stateless(self.running.model, name), self.running.layout
        is_tpu = layout.devices[0].platform == "tpu"
        several = max(layout.num_replicas, len(layout.holders)) > 1
        if several and is_tpu:
            return internals.with_divided_attention(step)
        return step

    def trace_step(self, batch: object) -> None:
        """Runs one step of `fit`; on a target, it is traced and noted."""
        running = self.running
        if not internals.compiles(running.model):
            received = "run_eagerly=True or jit_compile=False"
            expected = "a model that was compiled without them"
            layers = internals.layers_without_jit(running.model)
            if layers and not running.model.run_eagerly:
                names = ", ".join(f"'{layer.name}'" for layer in layers)
                received = f"layers that Keras does not compile: {names}"
                expected = "a model without them. Apply them to the data before"
            raise UnsupportedModelError(
                f"Model '{running.model.name}' runs its steps operation by "
                "operation, so there is nothing to compile. Received: "
                f"{received}. Expected: {expected}."
            )
        step = self._step("train_step")
        state = running.begin(
            internals.STATE_GROUPS, take_away=False, donate=True
        )
        try:
            step(state, batch)
        finally:
            running.sync()
            running.release()

    def reset_metrics(self) -> None:
        """Replaces Keras' `reset_metrics`, which begins each epoch of `fit`."""
        self.running.forget_epoch()
        internals.original(self.running.model, "reset_metrics")()

    def get_state(
        self, purge_model_variables: bool = False, **groups: bool
    ) -> Any:
        """Replaces Keras' `_get_jax_state`."""
        names = [n for n in internals.STATE_GROUPS if groups.get(n)]
        trains = "optimizer_variables" in names
        return self.running.begin(
            names,
            take_away=purge_model_variables,
            donate=purge_model_variables
            and trains
            and internals.compiles(self.running.model),
        )

    def _step(self, name: str, gather: bool = False) -> FitStep:
        running, fn = self.running, self._stateless(name)
        layout, trains = running.layout, name == "train_step"
        is_sharded = self._shard is not None
        if self._shard is not None:
            fn = self._shard(running.model, fn, _GROUPS[name])
        keep = changed_values(fn)
        if not internals.compiles(running.model):
            return FitStep(running, name, layout.eager(keep), eager=True)
        compiled = functools.partial(running.compiled, is_sharded=is_sharded)
        return FitStep(
            running,
            name,
            compiled(keep, gather=gather),
            compiled(all_values(fn), donate=True) if trains else None,
        )
