"""Copies of a user's model, and the state that they start with."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.errors import UnsupportedModelError
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_random
from keras_dist.internals import keras_saveables

INSTEAD = (
    "Instead of the model, pass `verify` the function that makes and compiles "
    "it: `strategy.verify(make_model, x, y)`"
)


def kinds_of(model: keras.Model) -> dict[int, str]:
    """Returns the `Difference.kind` of compared variables, by their ids."""
    kinds: dict[int, str] = {}
    for optimizer in keras_saveables.all_optimizers(model).values():
        kinds |= {id(v): "slot" for v in optimizer.variables}
    metrics = keras_saveables.metric_variables(model)
    for variable in keras_saveables.layer_variables(model):
        if id(variable) in metrics or keras_random.is_seed(variable):
            continue
        trained = variable.trainable
        kinds[id(variable)] = "weight" if trained else "state"
    return kinds


def values_of(variables: Sequence[keras.Variable]) -> list[Any]:
    """Returns the values of variables, copied into NumPy arrays."""
    return [
        np.array(keras.ops.convert_to_numpy(variable.value))
        for variable in variables
    ]


def maker_of(model: keras.Model) -> Callable[[], keras.Model]:
    """Returns a function that makes compiled copies; refuses other things."""
    if isinstance(model, keras.Model):
        if not getattr(model, "compiled", False):
            raise UnsupportedModelError(
                "`verify` trains a copy of a compiled model. Received: "
                f"'{model.name}', which is not compiled. Call "
                "`model.compile(...)` first."
            )
        return lambda: copy_of(model)
    if not callable(model):
        raise UnsupportedModelError(
            "`verify` takes a compiled `keras.Model`, or a function without "
            f"arguments that makes one. Received: {model!r} of type "
            f"{type(model).__name__}."
        )
    return lambda: _checked(model())


def copy_of(model: keras.Model) -> keras.Model:
    """Returns a compiled copy of a model, made from its configuration."""
    try:
        _check_compile(model)
        # The method of the class: the instance's adds the strategy.
        config = type(model).get_config(model)
        names = _named_things_of(model, config)
        with keras.saving.custom_object_scope(names):
            copy = type(model).from_config(config)
            _compile_like(copy, model)
    except Exception as error:
        message = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"Model '{model.name}' of class {type(model).__name__} can't be "
            f"copied from its configuration: {type(error).__name__}: "
            f"{message[:300].rstrip('.')}. {INSTEAD}."
        ) from error
    return copy


def check_alike(
    variables: Sequence[Any], other: Sequence[Any], expected: str
) -> None:
    """Refuses copies whose variables have other shapes or types."""
    kinds, other_kinds = (
        [(tuple(v.shape), v.dtype, v.trainable) for v in group]
        for group in (variables, other)
    )
    if kinds != other_kinds:
        raise UnsupportedModelError(
            "`verify` made copies of the model, and they differ. Received "
            "variables of these shapes, types, and whether they are trained: "
            f"{kinds} and {other_kinds}. Expected: {expected}."
        )


def _checked(model: keras.Model) -> keras.Model:
    if isinstance(model, tuple) and model:
        # `keras-dist bench --model` takes functions that return data too.
        model = model[0]
    if isinstance(model, keras.Model) and getattr(model, "compiled", False):
        return model
    raise UnsupportedModelError(
        "The function that `verify` was given has to return a compiled "
        f"`keras.Model`. Received: {model!r} of type {type(model).__name__}. "
        "Call `model.compile(...)` in it."
    )


def _check_compile(model: keras.Model) -> None:
    """Refuses a model whose `compile` can't be repeated."""
    cls = type(model)
    overrides_compile = cls.compile is not keras.Model.compile
    if (
        overrides_compile
        and cls.get_compile_config is keras.Model.get_compile_config
    ):
        raise TypeError(
            "its class overrides `compile` and has no `get_compile_config`"
        )


def _compile_like(copy: keras.Model, model: keras.Model) -> None:
    config = keras_internals.compile_arguments(model)
    if config is None:
        # The class has a `compile` of its own, and a `get_compile_config`.
        copy.compile_from_config(model.get_compile_config())
        return
    config["optimizer"] = _another(model.optimizer)
    # `compile` may have wrapped the optimizer to scale the loss already.
    config["auto_scale_loss"] = False
    config["steps_per_execution"] = 1
    for name in ("metrics", "weighted_metrics"):
        config[name] = keras.tree.map_structure(_another, config.get(name))
    copy.compile(**config)


def _another(thing: object) -> Any:
    if isinstance(thing, (keras.metrics.Metric, keras.optimizers.Optimizer)):
        return type(thing).from_config(thing.get_config())
    return thing


def _named_things_of(model: keras.Model, config: object) -> dict[str, Any]:
    """Returns the user's classes and functions, by their names in configs."""
    compiled = keras_internals.compile_arguments(model) or {}
    given = keras.tree.flatten(list(compiled.values()))
    configs = [
        argument.get_config() for argument in given if _has_config(argument)
    ]
    text = repr([config, *configs])
    things: list[Any] = [
        *model._flatten_layers(),
        *given,
        *keras_saveables.all_optimizers(model).values(),
        *keras_saveables.all_metrics(model),
    ]
    for thing in list(things):
        # Initializers, regularizers, activations and schedules.
        things += vars(thing).values() if hasattr(thing, "__dict__") else []
    by_name: dict[str, Any] = {}
    for thing in things:
        is_named = callable(thing) and hasattr(thing, "__name__")
        named = thing if is_named else type(thing)
        module = getattr(named, "__module__", None) or ""
        name = keras.saving.get_registered_name(named)
        if module.split(".")[0] in ("keras", "builtins"):
            continue
        if by_name.setdefault(name, named) is not named and repr(name) in text:
            raise TypeError(
                "the configuration has only the names of classes and "
                f"functions, and two of them are called '{name}'. Give each a "
                "name of its own, or register them with "
                "`keras.saving.register_keras_serializable`"
            )
    return by_name


def _has_config(thing: object) -> bool:
    return hasattr(thing, "get_config") and not isinstance(thing, type)
