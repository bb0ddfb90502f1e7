"""Copies of a user's model, and the state that they start from."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_dist.errors import UnsupportedModelError
from keras_dist.internals import keras_internals

# In the words of `Report`: what each variable of a model is to it.
Kinds = dict[int, str]


def optimizers_of(model: keras.Model) -> dict[str, Any]:
    """A model's optimizers, by the name of the attribute that has it."""
    return {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer)
    }


def variables_of(model: keras.Model) -> list[keras.Variable]:
    """Every variable that `fit` may change, in an order that copies share."""
    found = keras_internals.all_variables(model)
    for optimizer in optimizers_of(model).values():
        found += optimizer.variables
    return list({id(v): v for v in found}.values())


def kinds_of(model: keras.Model) -> Kinds:
    """What each variable of a model is: those that are compared."""
    kinds: Kinds = {}
    for optimizer in optimizers_of(model).values():
        kinds |= {id(v): "slot" for v in optimizer.variables}
    metrics = {
        id(v)
        for metric in keras_internals.all_metrics(model)
        for v in metric.variables
    }
    for variable in model.variables:
        if id(variable) in metrics or keras_internals.is_seed(variable):
            continue
        trained = variable.trainable
        kinds[id(variable)] = "weight" if trained else "state"
    return kinds


def values_of(variables: Sequence[keras.Variable]) -> list[Any]:
    """The values of variables, in memory of their own."""
    return [
        np.array(keras.ops.convert_to_numpy(each.value)) for each in variables
    ]


def set_values(
    variables: Sequence[keras.Variable], values: Sequence[Any]
) -> None:
    """Gives variables their values."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def maker_of(model: Any) -> Callable[[], keras.Model]:
    """What makes a compiled copy of a model, with a state of its own.

    Args:
        model: A compiled `keras.Model`, or a function without arguments that
            makes one.

    Raises:
        UnsupportedModelError: If it is no model, is not compiled, or if its
            making can't be repeated; see `copy_of`.
    """
    if isinstance(model, keras.Model):
        if not getattr(model, "compiled", False):
            raise UnsupportedModelError(
                f"`verify` trains a copy of the model, as it is compiled. "
                f"Received: '{model.name}', which is not compiled. Call "
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
    """A compiled copy of a model, made from what describes it.

    The loss functions are the model's own; layers, metrics and optimizers
    are new.

    Raises:
        UnsupportedModelError: If its configuration does not describe it.
    """
    try:
        with keras.saving.custom_object_scope(_classes_of(model)):
            _check_compile(model)
            # The class' own: an instance's tells of the strategy.
            config = type(model).get_config(model)
            copy = type(model).from_config(config)
            _compile_like(copy, model)
    except Exception as error:
        told = " ".join(str(error).split())
        raise UnsupportedModelError(
            f"Model '{model.name}' of class {type(model).__name__} can't be "
            f"copied from its configuration: {type(error).__name__}: "
            f"{told[:300].rstrip('.')}. "
            "Pass `verify` the function that makes and compiles it, in place "
            "of the model: `strategy.verify(make_model, x, y)`."
        ) from error
    return copy


def check_copy(copy: keras.Model, model: keras.Model) -> None:
    """Refuses a copy that has other variables than its model.

    Raises:
        UnsupportedModelError: If one has.
    """
    own, other = _shapes(copy), _shapes(model)
    if own != other:
        raise UnsupportedModelError(
            f"The copy of model '{model.name}', made from its configuration, "
            f"has other variables. Received: {own}. Expected: {other}. Pass "
            "`verify` the function that makes and compiles the model, in "
            "place of the model: `strategy.verify(make_model, x, y)`."
        )


def _shapes(model: keras.Model) -> list[tuple[tuple[int, ...], str, bool]]:
    return [
        (tuple(v.shape), str(v.dtype), bool(v.trainable)) for v in model.weights
    ]


def _checked(model: Any) -> keras.Model:
    if isinstance(model, tuple) and model:
        # What the same function gives to be measured.
        model = model[0]
    if isinstance(model, keras.Model) and getattr(model, "compiled", False):
        return model
    raise UnsupportedModelError(
        "The function that `verify` was given has to return a compiled "
        f"`keras.Model`. Received: {model!r} of type {type(model).__name__}. "
        "Call `model.compile(...)` in it."
    )


def _check_compile(model: keras.Model) -> None:
    """Refuses a `compile` that nobody can repeat."""
    cls = type(model)
    own = cls.compile is not keras.Model.compile
    if own and cls.get_compile_config is keras.Model.get_compile_config:
        raise TypeError(
            "its class overrides `compile` and has no `get_compile_config`"
        )


def _compile_like(copy: keras.Model, model: keras.Model) -> None:
    config = keras_internals.compile_arguments(model)
    if config is None:
        # The class has a `compile` of its own, and describes it.
        copy.compile_from_config(model.get_compile_config())
        return
    config["optimizer"] = _another(model.optimizer)
    # Tells of it: what `compile` was given may have been wrapped since.
    config["auto_scale_loss"] = False
    config["steps_per_execution"] = 1
    for name in ("metrics", "weighted_metrics"):
        config[name] = keras.tree.map_structure(_another, config.get(name))
    copy.compile(**config)


def _another(thing: Any) -> Any:
    """A metric or an optimizer like another one; anything else as it is."""
    if isinstance(thing, (keras.metrics.Metric, keras.optimizers.Optimizer)):
        return type(thing).from_config(thing.get_config())
    return thing


def _classes_of(model: keras.Model) -> dict[str, Any]:
    """The user's classes and functions, by the names that configs have."""
    config = keras_internals.compile_arguments(model) or {}
    things: list[Any] = [
        *model._flatten_layers(),
        *keras.tree.flatten(list(config.values())),
        *optimizers_of(model).values(),
        *keras_internals.all_metrics(model),
    ]
    for layer in list(things):
        # Initializers, regularizers, activations and schedules.
        things += (
            list(vars(layer).values()) if hasattr(layer, "__dict__") else []
        )
    found = {}
    for thing in things:
        named = (
            thing
            if callable(thing) and hasattr(thing, "__name__")
            else type(thing)
        )
        module = getattr(named, "__module__", None) or ""
        if module.split(".")[0] not in ("keras", "builtins"):
            found[named.__name__] = named
            found[keras.saving.get_registered_name(named)] = named
    return found
