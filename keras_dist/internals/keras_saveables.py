"""A door to Keras' private names: all that a model saves or tracks.

| name | why |
|---|---|
| `keras.Layer._flatten_layers` | whose variables are those of the model |
| `keras.Layer._layers`, `_metrics` | have all that a layer tracks |

Keras saves the objects in the attributes of a model, in the attributes of
these, and in lists, tuples and dicts, however deep. What is found here is in
the same order on all workers. No property is asked, but at a save: users' code
runs as often as their program says.
"""

import collections
import contextlib
import functools
import itertools
from collections.abc import Iterable
from typing import Any

import keras

from keras_dist.errors import UnsupportedModelError
from keras_dist.internals.keras_internals import Saveable
from keras_dist.internals.keras_internals import Trainer
from keras_dist.internals.keras_internals import is_of_keras
from keras_dist.internals.private_names import private

private("keras.Layer._flatten_layers")

# The name of the optimizer of `compile`.
COMPILED = "optimizer"
_FOLLOWED = (Saveable, dict, list, tuple)


def saveables(model: keras.Model, is_saving: bool = False) -> dict[str, Any]:
    """Returns a model and the objects in it, by place, the nearest first.

    A place is like `optimizers['d']`, and that of the model is empty. With
    `is_saving`, sets and what properties return are also looked through, where
    a checkpoint can't find an object again.
    """
    things: dict[str, Any] = {}
    followed = (*_FOLLOWED, set, frozenset) if is_saving else _FOLLOWED
    known = {id(model): model}  # kept alive: properties make containers
    waiting = collections.deque([("", model)])
    while waiting:
        place, thing = waiting.popleft()
        is_object = isinstance(thing, Saveable)
        if is_object:
            things[place.removeprefix(".")] = thing
        children = [
            (_part(is_object, key, position), child)
            for position, (key, child) in enumerate(_inside(thing, is_saving))
            if isinstance(child, followed)
        ]
        if is_object:
            # Private ones last, as Keras does, for the names that users know.
            children.sort(key=lambda pair: (pair[0].startswith("._"), pair[0]))
        for part, child in children:
            if id(child) not in known:
                known[id(child)] = child
                waiting.append((place + part, child))
    return things


def all_optimizers(model: keras.Model) -> dict[str, Any]:
    """Returns a model's optimizers by place, that of `compile` first.

    Those inside of another one, which has their variables, are left out.
    """
    return _optimizers(model, saveables(model))


def all_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns all metrics, also those of models inside of a model."""
    return _metrics(model, saveables(model))


def metric_variables(model: keras.Model) -> dict[int, keras.Variable]:
    """Returns the variables of all metrics, by id."""
    return {id(v): v for metric in all_metrics(model) for v in metric.variables}


def own_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns a model's metrics, also those that its `metrics` leaves out."""
    return unique([*model.metrics, *Trainer.metrics.fget(model)])


def layer_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of all layers, also of those in a loss, say."""
    return _of_layers(model, saveables(model))


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns all variables of a model, its optimizers and its metrics."""
    things = saveables(model)
    owners = [*_optimizers(model, things).values(), *_metrics(model, things)]
    variables = _of_layers(model, things)
    return unique(
        [*variables, *(v for owner in owners for v in owner.variables)]
    )


def check_found(model: keras.Model) -> None:
    """Refuses to save a model with an optimizer that would not be restored."""
    known = set(map(id, saveables(model).values()))
    for place, thing in saveables(model, is_saving=True).items():
        if isinstance(thing, keras.optimizers.Optimizer) and (
            id(thing) not in known
        ):
            raise UnsupportedModelError(
                f"Optimizer '{thing.name}' would be lost when model "
                f"'{model.name}' is restored. Received: the optimizer is at "
                f"`model.{place}`, in a set or behind a property. Expected: "
                "an optimizer that is an attribute of the model or of a layer, "
                "or is in a list, tuple or dict that is one."
            )


def unique(things: Iterable[Any]) -> list[Any]:
    """Returns each object once."""
    return list({id(thing): thing for thing in things}.values())


def _optimizers(model: keras.Model, things: dict[str, Any]) -> dict[str, Any]:
    compiled = getattr(model, COMPILED, None)
    optimizers = {} if compiled is None else {COMPILED: compiled}
    for place, thing in things.items():
        is_one = isinstance(thing, keras.optimizers.Optimizer)
        if is_one and thing is not compiled:
            optimizers[place] = thing
    ids = {
        p: set(map(id, optimizer.variables))
        for p, optimizer in optimizers.items()
    }
    return {
        place: optimizer
        for place, optimizer in optimizers.items()
        if not any(ids[place] < others for others in ids.values())
    }


def _metrics(
    model: keras.Model, things: dict[str, Any]
) -> list[keras.metrics.Metric]:
    places = [
        place
        for place, thing in things.items()
        if isinstance(thing, keras.metrics.Metric)
    ]
    # A metric updates those inside of it.
    inside = tuple(place + end for place in places for end in ".[")
    outermost = [
        things[place] for place in places if not place.startswith(inside)
    ]
    return unique([*own_metrics(model), *outermost])


def _of_layers(
    model: keras.Model, things: dict[str, Any]
) -> list[keras.Variable]:
    variables = list(model.variables)
    known = set(map(id, model._flatten_layers()))
    for thing in things.values():
        if isinstance(thing, keras.Layer) and id(thing) not in known:
            variables += thing.variables
    return unique(variables)


def _inside(thing: Any, is_saving: bool) -> Iterable[tuple[Any, Any]]:
    """Returns what is in an object or a container, with names or keys."""
    if isinstance(thing, Saveable):
        return _attributes(thing, is_saving).items()
    return thing.items() if isinstance(thing, dict) else enumerate(thing)


def _part(is_attribute: bool, key: object, position: int) -> str:
    """Returns a part of a place: how something is reached in its owner."""
    if is_attribute:
        return f".{key}"
    # Other keys may have another text in another process.
    return f"[{key!r}]" if isinstance(key, (str, int)) else f"[#{position}]"


def _attributes(thing: Any, is_saving: bool) -> dict[str, Any]:
    """Returns attributes of an object, and those of its class by a user."""
    classes = itertools.takewhile(
        lambda cls: not is_of_keras(cls), type(thing).__mro__
    )
    of_class = {
        name: value
        for cls in reversed([*classes])
        for name, value in vars(cls).items()
        if not name.startswith("__")
    }
    if is_saving:
        for name, value in of_class.items():
            # As Keras does: what raises is not saved.
            with contextlib.suppress(Exception):
                if hasattr(type(value), "__get__"):
                    of_class[name] = getattr(thing, name)
    instance_attributes = vars(thing)
    names = instance_attributes.keys()
    if isinstance(thing, keras.Layer):
        names -= _of_each_layer()
    return {**of_class, **{name: instance_attributes[name] for name in names}}


@functools.cache
def _of_each_layer() -> frozenset[str]:
    """Returns the attributes in which no layer has objects of a user."""
    names = vars(keras.Layer(name="keras_dist")).keys()
    return frozenset(names - {"_layers", "_metrics"})
