"""A record of the variables that each optimizer of a model was built for.

By that, optimizers that a first step would build are built before they are
restored.
"""

import contextlib
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras

from keras_dist.errors import UnsupportedModelError
from keras_dist.fit.plain_models import strategy_of
from keras_dist.internals import keras_saveables
from keras_dist.internals.keras_optimizers import trainable_variables

_MOST_SHOWN = 3
# For each optimizer by place, the positions of variables among those of the
# layers; `None` for one that is not built.
Built = dict[str, list[int] | None]


def built_for(model: keras.Model) -> Built:
    """Returns what a checkpoint says; refuses a model that lacks variables."""
    keras_saveables.check_found(model)
    variables = keras_saveables.layer_variables(model)
    positions = {id(variable): i for i, variable in enumerate(variables)}
    built: Built = {}
    for place, optimizer in keras_saveables.all_optimizers(model).items():
        trained = trainable_variables(optimizer) if optimizer.built else []
        for variable in trained:
            if id(variable) not in positions:
                raise UnsupportedModelError(
                    f"Optimizer '{optimizer.name}' could not be restored with "
                    f"model '{model.name}'.\nReceived: the optimizer at "
                    f"`model.{place}` was built for the variable "
                    f"'{variable.path}', which no layer of the model has. "
                    "Expected: a model with all variables that its optimizers "
                    "update. Make their layers attributes of the model."
                )
        built[place] = None
        if optimizer.built:
            built[place] = [positions[id(variable)] for variable in trained]
    return built


def build_as_saved(
    model: keras.Model, saved: Built | None, variables: Sequence[Any]
) -> None:
    """Builds optimizers for those of `variables` that a checkpoint names.

    Older checkpoints, and Keras' own files, say nothing: `saved` is `None`.
    """
    optimizers = keras_saveables.all_optimizers(model)
    if saved is None:
        build_optimizer(model)
        return
    if not optimizers:
        return  # a model that is not compiled takes its weights alone
    if set(optimizers) != set(saved):
        raise ValueError(
            f"Model '{model.name}' has other optimizers than the checkpoint. "
            f"Received: {_named(optimizers)}. Expected: {_named(saved)}, in "
            "these attributes."
        )
    for place, optimizer in optimizers.items():
        positions = saved[place]
        wanted = None
        if positions is not None:
            wanted = [variables[position] for position in positions]
        if wanted is not None and not optimizer.built:
            _build(model, optimizer, wanted)
        _check_built(model, place, optimizer, wanted)


def build_optimizer(model: keras.Model) -> None:
    """Builds the optimizer of `compile` as `fit` does, unless it is built."""
    optimizer = getattr(model, keras_saveables.COMPILED, None)
    if optimizer is not None and not optimizer.built:
        _build(model, optimizer, model.trainable_variables)


def _build(
    model: keras.Model,
    optimizer: keras.Optimizer,
    variables: list[keras.Variable],
) -> None:
    strategy = strategy_of(model)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        optimizer.build(variables)


def _check_built(
    model: keras.Model,
    place: str,
    optimizer: keras.Optimizer,
    wanted: list[keras.Variable] | None,
) -> None:
    """Refuses to restore slots of other variables, which would be lost."""
    trained = trainable_variables(optimizer) if optimizer.built else None
    if _ids(trained) != _ids(wanted):
        raise ValueError(
            f"Optimizer '{optimizer.name}' can't be restored.\nReceived: the "
            f"optimizer at `model.{place}` of '{model.name}', built for "
            f"{_paths(trained)}. Expected: {_paths(wanted)}, as when the "
            "checkpoint was saved. Restore before the optimizer is built, or "
            "build it with `optimizer.build(variables)` for the same ones."
        )


def _ids(variables: list[keras.Variable] | None) -> list[int] | None:
    return None if variables is None else list(map(id, variables))


def _paths(variables: list[keras.Variable] | None) -> str:
    if variables is None:
        return "no variables yet"
    shown = ", ".join(
        f"'{variable.path}'" for variable in variables[:_MOST_SHOWN]
    )
    more = ", ..." if len(variables) > _MOST_SHOWN else ""
    return f"{len(variables)} variables ({shown}{more})"


def _named(optimizers: Mapping[str, Any]) -> str:
    return ", ".join(f"`model.{place}`" for place in optimizers) or "none"
