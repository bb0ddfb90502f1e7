"""Two copies of a model: one on one device, one under the strategy."""

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING
from typing import Any

import keras

from keras_dist.errors import UnsupportedModelError
from keras_dist.internals import keras_internals
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.randomness import random_state
from keras_dist.plugin.randomness import set_random_state
from keras_dist.verification.batches import Batch
from keras_dist.verification.copies import check_copy
from keras_dist.verification.copies import maker_of
from keras_dist.verification.copies import optimizers_of
from keras_dist.verification.copies import values_of
from keras_dist.verification.copies import variables_of
from keras_dist.verification.runs import Copy

if TYPE_CHECKING:
    from keras_dist.replica.strategy_core import StrategyBase


@dataclass(frozen=True)
class Pair:
    """Two copies that start alike.

    `own` is plain Keras on one device, `other` is under the strategy.
    """

    own: Copy
    other: Copy
    num_replicas: int


def pair_of(strategy: "StrategyBase", model: Any, batch: Batch) -> Pair:
    """Makes both copies, with the state of the user's model.

    `model` is a compiled `keras.Model`, or a function that makes one. Layers
    that wait for a batch are built with `batch`.

    Raises:
        UnsupportedModelError: If the model can't be made a second time.
    """
    make, backend = maker_of(model), get_backend()
    copies = []
    state = random_state(backend)
    for scope in (contextlib.nullcontext, strategy.scope):
        # Both copies get the same names and the same random numbers.
        keras_internals.set_name_counts({})
        set_random_state(backend, state)
        copy = Copy(make, scope, backend)
        copy.build(batch)
        if isinstance(model, keras.Model) and model.built:
            check_copy(copy.model, model)
        copies.append(copy)
    own, other = copies
    given = variables_of(own.model)
    _check_same(given, variables_of(other.model))
    values, names = values_of(given), [v.path for v in given]
    if isinstance(model, keras.Model) and model.built:
        users = _of_user(own.model, model)
        chosen = [users.get(id(v)) for v in given]
        names = [
            name if variable is None else variable.path
            for name, variable in zip(names, chosen, strict=True)
        ]
        values = [
            value if variable is None else values_of([variable])[0]
            for value, variable in zip(values, chosen, strict=True)
        ]
    state = random_state(backend)
    for copy in copies:
        copy.begin(values, names, state)
    return Pair(own, other, strategy.num_replicas_in_sync)


def _of_user(copy: keras.Model, model: keras.Model) -> dict[int, Any]:
    """Maps the id of each variable of the copy to the user's variable."""
    pairs = [(_of_layers(copy), _of_layers(model))]
    optimizers = optimizers_of(model)
    for name, optimizer in optimizers_of(copy).items():
        if name in optimizers and optimizers[name].built:
            pairs.append((optimizer.variables, optimizers[name].variables))
    return {
        id(variable): other
        for variables, others in pairs
        if len(variables) == len(others)
        for variable, other in zip(variables, others, strict=True)
        if tuple(variable.shape) == tuple(other.shape)
    }


def _of_layers(model: keras.Model) -> list[keras.Variable]:
    """Returns weights and states of seed generators, but not of metrics."""
    metrics = {
        id(v)
        for metric in keras_internals.all_metrics(model)
        for v in metric.variables
    }
    return [v for v in model.variables if id(v) not in metrics]


def _check_same(own: list[Any], other: list[Any]) -> None:
    """Refuses copies whose variables have different shapes."""
    shapes = [
        [f"{v.path}{tuple(v.shape)}" for v in each] for each in (own, other)
    ]
    if [tuple(v.shape) for v in own] != [tuple(v.shape) for v in other]:
        raise UnsupportedModelError(
            "`verify` made two copies of the model, and they differ. "
            f"Received: {shapes[0]} and, under the strategy, {shapes[1]}. "
            "Expected: the same variables each time that it is made."
        )
