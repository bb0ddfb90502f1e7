"""Models of no strategy that would train what belongs to one."""

import contextlib
import functools
from typing import Any

import keras

from keras_dist import context
from keras_dist.errors import StrategyMismatchError
from keras_dist.training.binding import binding_of
from keras_dist.training.keras_internals import all_variables
from keras_dist.training.origin import notice


@functools.cache
def install() -> None:
    """Has models keep apart from strategies from now on."""
    build = keras.Model._symbolic_build
    make = keras.Model.make_train_function

    @functools.wraps(build)
    def _symbolic_build(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        # In a scope too, a model of no strategy gets slots of none.
        is_plain = binding_of(self) is None
        with context.left() if is_plain else contextlib.nullcontext():
            build(self, *args, **kwargs)

    @functools.wraps(make)
    def make_train_function(self: keras.Model, force: bool = False) -> Any:
        # What is made already was checked: `compile` has it made anew.
        if binding_of(self) is None and not self.train_function:
            _check(self)
            notice(self)
        return make(self, force)

    keras.Model._symbolic_build = _symbolic_build
    keras.Model.make_train_function = make_train_function


def _check(model: keras.Model) -> None:
    in_layers = {id(each) for each in model.variables}
    for variable in all_variables(model):
        # Variables of the framework's own strategies have none of ours, and
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
