"""The table of what is replaced in Keras, and why.

`table` is in place while a scope is open, while `run` or a trace calls a
function, and as long as a model or variable of a strategy lives. Then Keras is
as it was. Backends add rows of their own: see `Backend.hooks`.
"""

import contextlib
import operator
from collections.abc import Iterator
from functools import partial

import keras

from keras_dist.cluster_resolver.detection import place
from keras_dist.fit import creation
from keras_dist.fit import draws
from keras_dist.fit import layers
from keras_dist.fit import losses
from keras_dist.fit import metrics
from keras_dist.fit import normalization
from keras_dist.fit import plain_models
from keras_dist.fit import updates
from keras_dist.fit.workers import chief_saves
from keras_dist.fit.workers import iterators
from keras_dist.fit.workers import state_file
from keras_dist.internals import keras_internals
from keras_dist.internals.hooks import Hook
from keras_dist.internals.hooks import Hooks
from keras_dist.internals.hooks import as_hook
from keras_dist.internals.keras_data import EpochIterator
from keras_dist.internals.keras_internals import Trainer
from keras_dist.internals.keras_internals import cloning
from keras_dist.internals.keras_internals import saving_lib
from keras_dist.internals.keras_optimizers import WITH_APPLY
from keras_dist.internals.keras_random import random_backend
from keras_dist.plugin.backend import get_backend

_JOINS = "what is made in a scope belongs to its strategy"
_APART = "a plain model in a scope belongs to no strategy, and says so"
_COPIES = "a copy of a distributed model is distributed too"
_ORIGIN = "a plain model made of a distributed one's data says so"
_SAVES = "the chief of several workers saves, and the others wait"
_GLOBAL = "a loss is that of the global batch"
_STATISTICS = "batch statistics are those of all replicas' rows"
_SHARED = "replicas share layers, and what these are given"


def table() -> Iterator[Hook]:
    """Returns the rows, by what they are for."""
    optimizer, loss = keras.optimizers.Optimizer, keras.losses.Loss
    variable, layer = keras.Variable, keras.Layer
    batch_norm = keras.layers.BatchNormalization

    # First: of several hooks on one attribute, the last is called first.
    yield from get_backend().hooks()

    for cls, of_model in ((keras.Model, True), (Trainer, False)):
        make = as_hook(partial(creation.hook_init, of_model))
        yield Hook(cls, "__init__", make, _JOINS)
    yield Hook(variable, "__init__", creation.hook_variable, _JOINS)
    metric_state = creation.hook_metric_state
    yield Hook(keras.Metric, "add_variable", metric_state, _JOINS)
    name = "add_variable_from_reference"
    yield Hook(optimizer, name, creation.hook_slot, _JOINS)

    symbolic_build = creation.hook_symbolic_build
    yield Hook(Trainer, "_symbolic_build", symbolic_build, _APART)
    for name in ("train", "test", "predict"):
        make = as_hook(partial(creation.hook_make_function, f"{name}_function"))
        yield Hook(Trainer, f"make_{name}_function", make, _APART)

    copying = plain_models.hook_copying
    yield Hook(cloning, "_clone_sequential_model", copying, _COPIES)
    yield Hook(cloning, "_clone_functional_model", copying, _COPIES)
    saveable, deepcopy = keras_internals.Saveable, plain_models.hook_deepcopy
    yield Hook(saveable, "__deepcopy__", deepcopy, _COPIES)
    for cls in (keras.Model, keras.Sequential):
        make = plain_models.hook_from_config
        yield Hook(cls, "from_config", make, _ORIGIN)
    writing, reading = plain_models.hook_writing, plain_models.hook_reading
    yield Hook(saving_lib, "_serialize_model_as_json", writing, _ORIGIN)
    yield Hook(saving_lib, "_model_from_config", reading, _ORIGIN)

    for owner, name in keras_internals.SAVING:
        yield Hook(owner, name, chief_saves.hook_save, _SAVES)
    for module in keras_internals.LOADING:
        why = "a part that a backup lacks is an error"
        yield Hook(module, "warnings", state_file.hook_warnings, why)
    why = "workers compare the data that they read"
    yield Hook(EpochIterator, "__init__", iterators.hook_iterator, why)

    for cls in keras_internals.losses_with_own_call():
        yield Hook(cls, "__call__", losses.hook_call, _GLOBAL)
    yield Hook(loss, "__call__", losses.hook_own_call, _GLOBAL, True)
    for module in keras_internals.modules_that_reduce_losses():
        reduction = losses.hook_reduction
        yield Hook(module, "reduce_weighted_values", reduction, _GLOBAL)
    for name, by in (("scale", operator.truediv), ("unscale", operator.mul)):
        name = f"{name}_loss_for_distribution"
        make = as_hook(partial(losses.scale, by))
        yield Hook(keras_internals.losses, name, make, _GLOBAL)
    why = "a user's metric is updated once, with all rows"
    yield Hook(keras.Metric, "__call__", metrics.hook_own_call, why, True)

    yield Hook(batch_norm, "_moments", normalization.hook_moments, _STATISTICS)
    constructor = normalization.hook_constructor
    yield Hook(batch_norm, "__init__", constructor, _STATISTICS)

    yield Hook(layer, "_clear_losses", layers.hook_clear_losses, _SHARED)
    yield Hook(layer, "add_loss", layers.hook_add_loss, _SHARED)
    yield Hook(layer, "_maybe_build", layers.hook_build, _SHARED)

    why = "an update is made once, with the sum of all gradients"
    for cls in WITH_APPLY:
        yield Hook(cls, "apply", updates.hook_apply, why)
    yield Hook(optimizer, "apply", updates.hook_apply, why, True)

    why = "replicas draw rows of what one device draws"
    yield Hook(keras.random.SeedGenerator, "next", draws.hook_seed, why)
    for name in draws.NAMES:
        make = partial(draws.hook_drawing, name)
        yield Hook(random_backend, name, make, why)


def _of_workers() -> Iterator[Hook]:
    why = "a model that others don't train does not train alone"
    for name in ("fit", "train_on_batch"):
        make = as_hook(partial(plain_models.hook_training, name))
        yield Hook(Trainer, name, make, why)


_hooks_of_workers = Hooks(_of_workers)
_since_import = contextlib.ExitStack()


def watch_training(strategy: object = None) -> None:
    """Checks each model that begins to train in one of several workers.

    That begins when keras_dist is imported, and ends with the last strategy.
    """
    detected = place()
    if detected is None or detected[0].number == 1:
        return
    if strategy is None:
        _since_import.enter_context(_hooks_of_workers)
    else:
        _hooks_of_workers.stay_with(strategy)
        _since_import.close()
