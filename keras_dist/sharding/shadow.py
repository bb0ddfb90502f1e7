"""The optimizer of flat parts that a `ShardedOptimizer` uses."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_dist.core import context
from keras_dist.errors import UnsupportedModelError
from keras_dist.internals import keras_internals
from keras_dist.internals.keras_internals import opened
from keras_dist.sharding.parts import Parts
from keras_dist.sharding.supported import inner_of
from keras_dist.sharding.supported import settings_of

_ACCUMULATOR = "gradient_accumulator"


@dataclass(frozen=True)
class OptimizerSlot:
    """An optimizer's variable that belongs to a variable that it updates."""

    index: int  # of the trainable variable
    name: str  # of this kind of slot


class Shadow:
    """A copy of an optimizer, built for flat parts, that holds no values."""

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[keras.Variable],
        parts: Sequence[Parts],
        clip: Callable[[list[Any]], list[Any]],
        is_finite: Callable[[list[Any]], Any],
    ) -> None:
        self.scales_loss = isinstance(
            optimizer, keras.optimizers.LossScaleOptimizer
        )
        own = inner_of(optimizer)
        with _outside():
            flat = list(map(_flat_like, variables, parts))
            self.inner = _another(own)
            self.optimizer = self.inner
            if self.scales_loss:
                self.optimizer = keras.optimizers.LossScaleOptimizer(
                    self.inner,
                    optimizer.initial_scale,
                    optimizer.dynamic_growth_steps,
                    name=optimizer.name,
                )
            made = self._build(flat)
        # Variables at the end of ours that are not in the original's.
        self.left_out = self._track_left_out(own)
        positions = {id(v): i for i, v in enumerate(self.optimizer.variables)}
        # By position; accumulators' positions by index.
        self.slots = {positions[id(v)]: slot for v, slot in made}
        self.accumulators = {
            slot.index: position
            for position, slot in self.slots.items()
            if slot.name == _ACCUMULATOR
        }
        self._check(optimizer, variables)
        if self.scales_loss:
            vars(self.optimizer)["check_finite"] = is_finite
            scale = self.optimizer.dynamic_scale
            self.position_of_scale = positions[id(scale)]
        whole = {id(f): v for f, v in zip(flat, variables, strict=True)}
        keras_internals.update_with(
            self.inner,
            clip,
            lambda v: keras_internals.uses_weight_decay(own, whole[id(v)]),
        )
        self._flat = flat
        for variable in [*flat, *self.optimizer.variables]:
            keras_internals.set_value(variable, None)

    def apply_to(
        self,
        values: Sequence[Any],
        gradients: Sequence[Any],
        parameters: Sequence[Any],
    ) -> None:
        """Updates the optimizer's values and the parameters in place."""
        variables = [*self.optimizer.variables, *self._flat]
        try:
            for variable, tensor in zip(
                variables, [*values, *parameters], strict=True
            ):
                keras_internals.set_value(variable, tensor)
            self.optimizer.apply(list(gradients), self._flat)
        finally:
            for variable in variables:
                keras_internals.set_value(variable, None)

    def follow(self, optimizer: Any, rate: Any = None) -> None:
        """Copies settings of the original that may have changed."""
        pairs = [(inner_of(optimizer), self.inner)]
        if self.scales_loss:
            pairs.append((optimizer, self.optimizer))
        for theirs, ours in pairs:
            settings = vars(ours)
            settings.update(
                {
                    name: value
                    for name, value in settings_of(theirs).items()
                    if name in settings
                }
            )
            own = keras_internals.learning_rate_of(theirs)
            if not isinstance(own, keras.Variable):
                own = own if rate is None else rate
                keras_internals.set_learning_rate_of(ours, own)

    def _build(
        self, flat: list[keras.Variable]
    ) -> list[tuple[keras.Variable, OptimizerSlot]]:
        """Builds the optimizer, and returns its slots."""
        places = {id(variable): i for i, variable in enumerate(flat)}
        made: list[tuple[keras.Variable, OptimizerSlot]] = []
        original = self.inner.add_variable_from_reference

        def add(
            reference_variable: Any, name: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            slot = original(reference_variable, name, *args, **kwargs)
            made.append(
                (slot, OptimizerSlot(places[id(reference_variable)], name))
            )
            return slot

        vars(self.inner)["add_variable_from_reference"] = add
        try:
            self.optimizer.build(flat)
        finally:
            del vars(self.inner)["add_variable_from_reference"]
        return made

    def _track_left_out(self, own: Any) -> list[keras.Variable]:
        """Tracks variables outside of `variables`; Nadam has one."""
        known = {id(variable) for variable in own.variables}
        left_out = []
        for name, value in vars(own).items():
            ours = vars(self.inner).get(name)
            if (
                isinstance(value, keras.Variable)
                and isinstance(ours, keras.Variable)
                and id(value) not in known
            ):
                keras_internals.track_variable(self.inner, ours)
                left_out.append(value)
        return left_out

    def _check(
        self, optimizer: Any, variables: Sequence[keras.Variable]
    ) -> None:
        theirs = [*optimizer.variables, *self.left_out]
        ours = self.optimizer.variables
        same = len(theirs) == len(ours) and all(
            tuple(variable.shape)
            == tuple(
                variables[self.slots[i].index].shape
                if i in self.slots
                else ours[i].shape
            )
            for i, variable in enumerate(theirs)
        )
        if not same:
            raise UnsupportedModelError(
                f"Optimizer '{optimizer.name}' of class "
                f"{type(optimizer).__name__} can't be made again for parts of "
                f"variables. Received: variables of shapes "
                f"{[tuple(v.shape) for v in theirs]}, and for parts "
                f"{[tuple(v.shape) for v in ours]}. Expected: variables that "
                "its config decides, slots made with "
                "`add_variable_from_reference`. Change it, or use "
                "optimizer_state='mirrored'."
            )


def _another(optimizer: Any) -> Any:
    """Returns an optimizer of the same class and settings, not built."""
    rate = keras_internals.learning_rate_of(optimizer)
    # A config can't hold every function, and the value of a variable is passed
    # with each update.
    keras_internals.set_learning_rate_of(optimizer, None)
    try:
        config = optimizer.get_config()
    finally:
        keras_internals.set_learning_rate_of(optimizer, rate)
    own = 0.0 if isinstance(rate, keras.Variable) else rate
    return type(optimizer).from_config({**config, "learning_rate": own})


def _flat_like(variable: keras.Variable, parts: Parts) -> keras.Variable:
    flat = keras.Variable(
        shape=(parts.size,),
        initializer="zeros",
        dtype=variable.dtype,
        name=variable.name,
    )
    keras_internals.name_like(flat, variable)
    return flat


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """Makes objects inside the context belong to no strategy."""
    with opened(None), context.in_replica(None):
        yield
