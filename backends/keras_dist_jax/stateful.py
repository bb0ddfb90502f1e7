"""Steps written with variables, as steps of values.

`train_step(self, data)` reads and assigns variables, as on other backends.
Keras' trainer on JAX wants `train_step(self, state, data)`.
"""

from collections.abc import Callable
from typing import Any

import keras

from keras_dist.errors import UnsupportedModelError
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.layout import StepFn

_GROUPS = {
    "train_step": internals.STATE_GROUPS,
    "test_step": (*internals.STATE_GROUPS[:2], "metrics_variables"),
    "predict_step": internals.STATE_GROUPS[:2],
}


def stateless(model: keras.Model, name: str) -> StepFn:
    """Returns a step of a model's as a function of its state.

    `name` is `"train_step"`, `"test_step"` or `"predict_step"`.

    Returns:
        Callable from the state and a batch to the step's result and the new
        state, both in the groups of Keras' trainer.
    """
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
    def step(state: Any, data: Any) -> tuple[Any, Any]:
        groups = _variables(model, name)
        _check_lengths(model, name, groups, state)
        with _StateScope(groups, state) as scope:
            outputs = method(data)
        _check_lengths(model, name, _variables(model, name), state)
        _check_assigned(name, scope, groups)
        return outputs, [[scope.own(v) for v in group] for group in groups]

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

    def own(self, variable: keras.Variable) -> Any:
        """Returns a variable's value after the step."""
        return self.state_mapping[id(variable)]


def _check_lengths(
    model: keras.Model, name: str, groups: Any, state: Any
) -> None:
    got, expected = [len(g) for g in groups], [len(g) for g in state]
    if got != expected:
        known = {id(v) for group in groups for v in group}
        raise UnsupportedModelError(
            f"`{name}` of model '{model.name}' made variables while it was "
            f"traced. Received: {got} variables in the groups "
            f"{list(_GROUPS[name])}. Expected: {expected}, of {len(known)} "
            "in all, as before the step. Build layers, optimizers and "
            "metrics before `fit`: call the model and `update_state` on a "
            "batch, `optimizer.build(variables)`, then `reset_state()`."
        )


def _check_assigned(name: str, scope: _StateScope, groups: Any) -> None:
    known = {id(variable) for group in groups for variable in group}
    for key, variable in scope.assigned.items():
        if key not in known:
            raise UnsupportedModelError(
                f"`{name}` assigned variable '{variable.path}', which is no "
                "part of the model's state, so that its value would be lost "
                f"on JAX. Expected: variables in {list(_GROUPS[name])} of "
                "the model. Make what owns it (a layer, a metric, an "
                "optimizer, a `keras.random.SeedGenerator`) an attribute of "
                "the model."
            )
