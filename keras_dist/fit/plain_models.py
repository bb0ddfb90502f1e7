"""Refuses to train a strategy's variables by a model of no strategy."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras

from keras_dist.core import context
from keras_dist.errors import StrategyMismatchError
from keras_dist.fit.binding import binding_of
from keras_dist.fit.origin import notice
from keras_dist.fit.origin import notice_scope
from keras_dist.internals.keras_internals import Trainer
from keras_dist.internals.keras_internals import all_variables


@functools.cache
def install() -> None:
    """Wraps the methods of Keras that build and train models, for good."""
    build = Trainer._symbolic_build

    @functools.wraps(build)
    def _symbolic_build(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        # Slots for a model of no strategy belong to none, in a scope too.
        is_plain = binding_of(self) is None
        with context.left() if is_plain else contextlib.nullcontext():
            build(self, *args, **kwargs)

    Trainer._symbolic_build = _symbolic_build
    for name in ("train", "test", "predict"):
        method = f"make_{name}_function"
        original = getattr(Trainer, method)
        setattr(Trainer, method, _looks_at_plain(original, name == "train"))


def _looks_at_plain(
    original: Callable[..., Any], trains: bool
) -> Callable[..., Any]:
    """Wraps a method that makes the function of `fit` or a relative."""

    @functools.wraps(original)
    def make_function(self: keras.Model, force: bool = False) -> Any:
        if binding_of(self) is None:
            notice_scope(self)
            # An existing train function was checked; `compile` removes it.
            if trains and not self.train_function:
                _check(self)
                notice(self)
        return original(self, force)

    return make_function


def _check(model: keras.Model) -> None:
    in_layers = {id(each) for each in model.variables}
    for variable in all_variables(model):
        # Variables of the framework's own strategies have no such owner, and
        # those of one device are plain ones.
        owner = vars(variable).get("distribute_strategy")
        if owner is None or owner.plan.is_one_device:
            continue
        if id(variable) in in_layers and owner.executor.shares_layers:
            continue
        raise StrategyMismatchError(
            f"Model '{model.name}' was made outside of any scope, and its "
            f"variable '{variable.path}' belongs to {owner!r}. Expected: all "
            "under one strategy. Make the model, its layers and its optimizer "
            "inside of the scope, or all outside, or adopt the model with "
            "`strategy.distribute(model)`."
        )
