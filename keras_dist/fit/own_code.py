"""Warns of code of the user's that replicas run, each with its own rows.

It is found by looking at classes and instances, never by calling it.
"""

import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist.errors import ReplicaCodeWarning
from keras_dist.fit.workers.agreement import first_of
from keras_dist.plugin.front_end import STEPS
from keras_dist.plugin.front_end import is_replicated
from keras_dist.replica.strategy_core import StrategyBase

_METHODS = (*STEPS, "compute_loss", "compute_metrics", "call")
# Packages whose layers treat each row alone.
_KNOWN = ("keras", "keras_hub")
# Classes of Keras that run code of the user.
_OF_USERS = (
    "FlaxLayer",
    "JaxLayer",
    "Lambda",
    "TFSMLayer",
    "TorchModuleWrapper",
)
_no_code = (lambda: None).__code__

_warned: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()
_equal: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()
# Layers that add numbers.
_adding: "weakref.WeakSet[keras.Layer]" = weakref.WeakSet()


def names(model: keras.Model) -> list[str]:
    """Returns the methods and layers of a model that are the user's, and the
    operations between layers that may combine rows."""
    methods = [f"`{name}`" for name in _own_methods(model)]
    return [*methods, *_layers(model), *_operations(model)]


def _own_methods(model: keras.Model) -> list[str]:
    return [name for name in _METHODS if _has_own(model, name)]


def _has_own(model: keras.Model, name: str) -> bool:
    given = vars(model).get(name)
    if given is not None and not is_replicated(given):
        return True
    return not _is_known(getattr(type(model), name, None))


def _layers(model: keras.Model) -> Iterator[str]:
    for layer in model._flatten_layers(include_self=False):
        cls = type(layer)
        if not _is_known(cls) or cls.__name__ in _OF_USERS:
            yield f"layer '{layer.name}' ({cls.__name__})"


def _operations(model: keras.Model) -> Iterator[str]:
    for layer in model._flatten_layers():
        for operation in getattr(layer, "operations", ()):
            is_layer = isinstance(operation, keras.Layer)
            if not is_layer and _may_combine_rows(operation):
                yield f"operation '{operation.name}'"


def _may_combine_rows(operation: Any) -> bool:
    """Tells by the axes of an operation, and by its symbolic shapes."""
    try:
        sides = operation.input, operation.output
    except ValueError:
        return True  # It is called more than once.
    given, made = (
        [tuple(leaf.shape) for leaf in keras.tree.flatten(side)]
        for side in sides
    )
    if not any(shape[:1] == (None,) for shape in given):
        return False
    most = max(shape.count(None) for shape in given)
    if any(s[:1] != (None,) or s.count(None) > most for s in made):
        return True
    rank, axis = max(map(len, given)), getattr(operation, "axis", ())
    axes = [0] if axis is None else keras.tree.flatten(axis)
    return any(isinstance(n, int) and n % rank == 0 for n in axes)


def hands_rows_only(model: keras.Model) -> bool:
    """Returns whether all arrays that losses and metrics get have rows.

    Of methods of the user's it is not known, nor of an output without rows.
    """
    if _own_methods(model):
        return False
    # Of a model that is built layer by layer there are none yet.
    outputs = keras.tree.flatten(getattr(model, "outputs", None))
    return all(
        output is not None and len(output.shape) and output.shape[0] is None
        for output in outputs
    )


def adding(model: keras.Model) -> list[str]:
    """Returns the names of the user's layers whose code calls `add_loss`."""
    return [
        f"layer '{layer.name}'"
        for layer in model._flatten_layers()
        if any(
            "add_loss" in getattr(method, "__code__", _no_code).co_names
            for base in type(layer).__mro__
            if not _is_known(base)
            for method in vars(base).values()
        )
    ]


def _is_known(definition: object) -> bool:
    module = getattr(definition, "__module__", None) or ""
    return module.split(".")[0] in _KNOWN


def found_equal(model: keras.Model) -> None:
    """Notes that `verify` found a model equal: no warning tells of it."""
    _equal.add(model)


def tell(strategy: StrategyBase, model: keras.Model) -> None:
    """Warns, once for each model, if it has code of the user's."""
    if model in _warned or not _is_wanted(strategy, model):
        return
    _warned.add(model)
    users_code = names(model)
    if not users_code:
        return
    count, code = strategy.plan.num_replicas, first_of(users_code)
    warnings.warn(
        f"Model '{model.name}' has code of yours that keras_dist runs once in "
        f"each of {count} replicas, on the rows of that replica: {code}.\n"
        "Code that treats each row alone gives the numbers of one device. A "
        "number that it computes counts as a mean over rows. Code that needs "
        "all rows (a sum, pairs of rows, a statistic of the batch) or counts "
        "in a Python attribute gives other numbers. "
        "`strategy.verify(model, x, y)` compares the model with one device; "
        "if they are the same, this warning does not come again.",
        ReplicaCodeWarning,
        stacklevel=3,
    )


def tell_of_number(
    strategy: StrategyBase, model: keras.Model, layer: keras.Layer, by: str
) -> None:
    """Warns, once for each layer, if code of a module adds a number as loss."""
    if by.split(".")[0] == "keras" or layer in _adding:
        return
    _adding.add(layer)
    if not _is_wanted(strategy, model):
        return
    warnings.warn(
        f"Layer '{layer.name}' of class {type(layer).__name__} adds a number "
        "as a loss (`add_loss`). keras_dist takes it for a mean over the rows "
        "that a replica has; a sum would count too little on "
        f"{strategy.plan.num_replicas} replicas. Expected: a mean, one value "
        "for each row (which Keras sums), or "
        "`self.add_loss(keras_dist.sum_over_rows(values))`.",
        ReplicaCodeWarning,
        stacklevel=3,
    )


def _is_wanted(strategy: StrategyBase, model: keras.Model) -> bool:
    plan = strategy.plan
    return plan.num_replicas > 1 and plan.is_chief and model not in _equal
