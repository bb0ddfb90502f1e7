"""Copies of a user's model, and the state that they start with."""

import types
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.errors import UnsupportedModelError
from keras_dist.internals import keras_internals
from keras_dist.internals import keras_random
from keras_dist.internals import keras_saveables


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
        np.array(keras.ops.convert_to_numpy(each.value)) for each in variables
    ]


def maker_of(model: Any) -> Callable[[], keras.Model]:
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
        with keras.saving.custom_object_scope(_classes_of(model)):
            _check_compile(model)
            # The method of the class: the instance's adds the strategy.
            config = type(model).get_config(model)
            copy = type(model).from_config(config)
            _compile_like(copy, model)
            _check_classes(copy, model)
    except Exception as error:
        told = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"Model '{model.name}' of class {type(model).__name__} can't be "
            f"copied from its configuration: {type(error).__name__}: "
            f"{told[:300].rstrip('.')}. Instead of the model, pass `verify` "
            "the function that makes and compiles it: "
            "`strategy.verify(make_model, x, y)`."
        ) from error
    return copy


def check_copy(copy: keras.Model, model: keras.Model) -> None:
    """Refuses a copy that has other variables than its model."""
    own, other = _shapes(copy), _shapes(model)
    if own != other:
        raise UnsupportedModelError(
            f"The copy of model '{model.name}', made from its configuration, "
            f"has other variables. Received: {own}. Expected: {other}. "
            "Instead of the model, pass `verify` the function that makes and "
            "compiles it: `strategy.verify(make_model, x, y)`."
        )


def _shapes(model: keras.Model) -> list[tuple[tuple[int, ...], str, bool]]:
    return [
        (tuple(v.shape), str(v.dtype), bool(v.trainable)) for v in model.weights
    ]


def _checked(model: Any) -> keras.Model:
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
    own = cls.compile is not keras.Model.compile
    if own and cls.get_compile_config is keras.Model.get_compile_config:
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


def _another(thing: Any) -> Any:
    if isinstance(thing, (keras.metrics.Metric, keras.optimizers.Optimizer)):
        return type(thing).from_config(thing.get_config())
    return thing


def _classes_of(model: keras.Model) -> dict[str, Any]:
    """Returns the user's classes and functions, by their names in configs."""
    found: dict[str, Any] = {}
    registered: dict[str, Any] = {}
    for thing in _things_of(model):
        named = _named(thing)
        module = getattr(named, "__module__", None) or ""
        if module.split(".")[0] not in ("keras", "builtins"):
            found[named.__name__] = named
            registered[keras.saving.get_registered_name(named)] = named
    return found | registered


def _things_of(model: keras.Model) -> list[Any]:
    """Returns all that a model and its `compile` may have of the user's."""
    config = keras_internals.compile_arguments(model) or {}
    things: list[Any] = [
        *model._flatten_layers(),
        *keras.tree.flatten(list(config.values())),
        *keras_saveables.all_optimizers(model).values(),
        *keras_saveables.all_metrics(model),
    ]
    for thing in list(things):
        # Initializers, regularizers, activations and schedules.
        things += (
            list(vars(thing).values()) if hasattr(thing, "__dict__") else []
        )
    return things


def _named(thing: Any) -> Any:
    """Returns a function or class itself, and the class of anything else."""
    is_named = callable(thing) and hasattr(thing, "__name__")
    return thing if is_named else type(thing)


def _check_classes(copy: keras.Model, model: keras.Model) -> None:
    """Refuses a copy where a shared name led to another class or function."""
    functions = {
        id(thing)
        for thing in _things_of(model)
        if isinstance(thing, types.FunctionType)
    }
    for own, other in _pairs_of(copy, model):
        _check_class(own, other)
        attributes = getattr(own, "__dict__", {})
        for name, value in getattr(other, "__dict__", {}).items():
            copied = attributes.get(name)
            if copied is value or copied is None:
                continue
            if hasattr(value, "get_config"):
                _check_class(copied, value)
            # A layer may make a function of its own, which no other one has.
            elif isinstance(value, types.FunctionType) and (
                id(copied) in functions
            ):
                _refuse(value)


def _pairs_of(
    copy: keras.Model, model: keras.Model
) -> Iterator[tuple[Any, Any]]:
    """Yields each layer, optimizer and metric of a copy, and the original."""
    yield from zip(
        copy._flatten_layers(), model._flatten_layers(), strict=False
    )
    ours = keras_internals.compile_arguments(copy) or {}
    theirs = keras_internals.compile_arguments(model) or {}
    for name in ("optimizer", "metrics", "weighted_metrics"):
        yield from zip(
            keras.tree.flatten(ours.get(name)),
            keras.tree.flatten(theirs.get(name)),
            strict=False,
        )


def _check_class(own: Any, other: Any) -> None:
    if type(own) is not type(other):
        _refuse(type(other))


def _refuse(named: Any) -> None:
    raise TypeError(
        "the configuration has only the names of classes and functions, and "
        f"'{named.__name__}' of module '{named.__module__}' was restored as "
        "another one. Give each a name of its own, or register them with "
        "`keras.saving.register_keras_serializable`"
    )
