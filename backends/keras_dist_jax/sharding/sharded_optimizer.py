"""An optimizer that updates one part of each variable. Norms and checks that
need more than one element are first summed over all parts."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from keras_dist.errors import UnsupportedModelError
from keras_dist.plugins import in_replica
from keras_dist.plugins import inner_of
from keras_dist.plugins import learning_rate_of
from keras_dist.plugins import name_like
from keras_dist.plugins import opened
from keras_dist.plugins import set_learning_rate_of
from keras_dist.plugins import set_value
from keras_dist.plugins import track_variable
from keras_dist.plugins import trainable_variables
from keras_dist.plugins import update_with
from keras_dist.plugins import uses_weight_decay
from keras_dist_jax.sharding.shards import ReplicaShard
from keras_dist_jax.sharding.supported import check_optimizer
from keras_dist_jax.sharding.supported import settings_of

_ACCUMULATOR = "gradient_accumulator"


@dataclass(frozen=True)
class OptimizerSlot:
    """An optimizer's variable that belongs to a variable that it updates."""

    index: int  # of the trainable variable
    name: str  # of this kind of slot


class ShardedOptimizer:
    """One optimizer's update of one part of each of its variables. A copy of
    the optimizer, made for parts, gets all values with each update."""

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        divide: Callable[[keras.Variable], ReplicaShard],
    ) -> None:
        check_optimizer(optimizer)
        trained = trainable_variables(optimizer)
        check_variables(trained)
        self.optimizer = optimizer
        self.trainable_variables = trained
        self.parts = [divide(variable) for variable in trained]
        # Sums over all parts of `amounts`, during an update.
        self._totals: Sequence[Any] = ()
        self._scales_loss = isinstance(
            optimizer, keras.optimizers.LossScaleOptimizer
        )
        inner = inner_of(optimizer)
        # What is made here belongs to no strategy.
        with opened(None), in_replica(None):
            own_shards = list(map(_shard_like, trained, self.parts))
            self._inner = _another(inner)
            self._copy = self._inner
            if self._scales_loss:
                self._copy = keras.optimizers.LossScaleOptimizer(
                    self._inner,
                    optimizer.initial_scale,
                    optimizer.dynamic_growth_steps,
                    name=optimizer.name,
                )
            made = self._build(own_shards)
        # Variables of the optimizer that are not in its own `variables`.
        self._left_out = self._track_left_out(inner)
        self.variables = [*optimizer.variables, *self._left_out]
        positions = {id(v): i for i, v in enumerate(self._copy.variables)}
        self._slots = {positions[id(v)]: slot for v, slot in made}
        self._accumulators = {
            slot.index: position
            for position, slot in self._slots.items()
            if slot.name == _ACCUMULATOR
        }
        self._check_copy()
        if self._scales_loss:
            vars(self._copy)["check_finite"] = self._is_finite
            self._position_of_scale = positions[id(self._copy.dynamic_scale)]
        pairs = zip(own_shards, trained, strict=True)
        whole = {id(part): variable for part, variable in pairs}
        update_with(
            self._inner,
            self._clip,
            lambda v: uses_weight_decay(inner, whole[id(v)]),
        )
        self._own_shards = own_shards
        for variable in [*own_shards, *self._copy.variables]:
            set_value(variable, None)

    def is_of(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Returns whether it was made for this optimizer and its variables."""
        num_known = len(self.variables) - len(self._left_out)
        known = self.variables[:num_known]
        return self.optimizer is optimizer and list(map(id, known)) == list(
            map(id, optimizer.variables)
        )

    def is_sharded(self, position: int) -> bool:
        """Returns whether `variables[position]` is in parts."""
        return position in self._slots

    def parts_of(self, position: int) -> ReplicaShard:
        """Returns how a slot is divided, which is as its variable is."""
        return self.parts[self._slots[position].index]

    def aligned(
        self,
        gradients: Sequence[Any],
        variables: Sequence[keras.Variable] | None = None,
    ) -> list[Any]:
        """Returns a gradient or `None` for each variable that is updated."""
        trained = self.trainable_variables
        of = trained if variables is None else list(variables)
        check_gradients(self.optimizer, gradients, of, trained)
        places = {id(variable): i for i, variable in enumerate(trained)}
        ordered: list[Any] = [None] * len(trained)
        for gradient, variable in zip(gradients, of, strict=True):
            ordered[places[id(variable)]] = gradient
        return ordered

    def amounts(
        self,
        optimizer_values: Sequence[Any],
        gradients: Sequence[Any],
        counted: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Returns float32 scalars of one part, to sum over all parts; `counted`
        says of each gradient that there is whether it counts in this sum."""
        self._follow()
        amounts = []
        if self._scales_loss:
            wrong = [
                _sum_of(ops.logical_not(ops.isfinite(g)))
                for g in gradients
                if g is not None
            ]
            amounts.append(ops.sum(ops.stack(wrong)))
        inner = self._inner
        if not (_is_on(inner.clipnorm) or _is_on(inner.global_clipnorm)):
            return amounts
        squares = [
            _sum_of(ops.square(ops.cast(g, "float32")))
            for g in self._unscaled(optimizer_values, gradients)
        ]
        if counted is not None:
            squares = [
                ops.where(counts, square, 0.0)
                for square, counts in zip(squares, counted, strict=True)
            ]
        if not _is_on(inner.clipnorm):
            squares = [ops.sum(ops.stack(squares))]
        return amounts + squares

    def updated(
        self,
        optimizer_values: Sequence[Any],
        gradients: Sequence[Any],
        parameters: Sequence[Any],
        totals: Sequence[Any],
        record: Callable[[Iterable[tuple[keras.Variable, Any]]], Any],
    ) -> list[Any]:
        """Returns the new values of one part of `variables`, then of the
        trainable ones; those that do not change are the given ones. `record`
        makes a scope of values that notes what is `written` in it."""
        variables = [*self._copy.variables, *self._own_shards]
        tensors = [*optimizer_values, *parameters]
        with (
            in_replica(None),
            record(zip(variables, tensors, strict=True)) as recording,
        ):
            self._apply(gradients, totals)
        written = {id(variable): new for variable, new in recording.written}
        pairs = zip(variables, tensors, strict=True)
        return [written.get(id(variable), tensor) for variable, tensor in pairs]

    def constrained(
        self, variable: keras.Variable, totals: Sequence[Any]
    ) -> Any:
        """Returns an updated variable's value under its constraint, or as it is
        if the loss was scaled too far, and there was no update."""
        value = variable.constraint(variable.value)
        if self._scales_loss:
            is_finite = self._all_finite(totals)
            value = ops.where(is_finite, value, variable.value)
        return value

    def _apply(self, gradients: Sequence[Any], totals: Sequence[Any]) -> None:
        self._follow()
        self._totals = totals
        try:
            pairs = [*zip(gradients, self._own_shards, strict=True)]
            present = [pair for pair in pairs if pair[0] is not None]
            if present:
                self._copy.apply(*map(list, zip(*present, strict=True)))
        finally:
            self._totals = ()

    def _follow(self) -> None:
        """Copies settings of the optimizer that may have changed."""
        pairs = [(inner_of(self.optimizer), self._inner)]
        if self._scales_loss:
            pairs.append((self.optimizer, self._copy))
        for theirs, ours in pairs:
            settings = vars(ours)
            for name, value in settings_of(theirs).items():
                if name in settings:
                    settings[name] = value
            rate = learning_rate_of(theirs)
            if not isinstance(rate, keras.Variable):
                set_learning_rate_of(ours, rate)

    def _build(
        self, own_shards: list[keras.Variable]
    ) -> list[tuple[keras.Variable, OptimizerSlot]]:
        """Builds the copy, and returns its slots."""
        places = {id(variable): i for i, variable in enumerate(own_shards)}
        made: list[tuple[keras.Variable, OptimizerSlot]] = []
        original = self._inner.add_variable_from_reference

        def add(
            reference_variable: Any, name: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            slot = original(reference_variable, name, *args, **kwargs)
            place = places[id(reference_variable)]
            made.append((slot, OptimizerSlot(place, name)))
            return slot

        vars(self._inner)["add_variable_from_reference"] = add
        try:
            self._copy.build(own_shards)
        finally:
            del vars(self._inner)["add_variable_from_reference"]
        return made

    def _track_left_out(self, inner: Any) -> list[keras.Variable]:
        """Tracks variables outside of `variables`; Nadam has one."""
        known = {id(variable) for variable in inner.variables}
        left_out = []
        for name, value in vars(inner).items():
            ours = vars(self._inner).get(name)
            if (
                isinstance(value, keras.Variable)
                and isinstance(ours, keras.Variable)
                and id(value) not in known
            ):
                track_variable(self._inner, ours)
                left_out.append(value)
        return left_out

    def _check_copy(self) -> None:
        optimizer, ours = self.optimizer, self._copy.variables
        theirs = [tuple(variable.shape) for variable in self.variables]
        expected = [
            self.parts_of(i).shape if self.is_sharded(i) else tuple(v.shape)
            for i, v in enumerate(ours)
        ]
        if theirs != expected:
            raise UnsupportedModelError(
                f"Optimizer '{optimizer.name}' of class "
                f"{type(optimizer).__name__} can't be made again for parts of "
                f"variables.\nReceived: variables of shapes {theirs}, and of "
                f"shapes {[tuple(v.shape) for v in ours]} for parts. "
                "Expected: variables that depend only on its config, and "
                "slots made with `add_variable_from_reference`. Change the "
                "optimizer, or use optimizer_state='mirrored'."
            )

    def _unscaled(
        self, values: Sequence[Any], gradients: Sequence[Any]
    ) -> list[Any]:
        """Returns the gradients that are clipped in a step that updates."""
        scale = self._inner.loss_scale_factor
        if self._scales_loss:
            scale = values[self._position_of_scale]
        steps = self._inner.gradient_accumulation_steps
        result = []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if scale is not None:
                gradient = ops.divide(gradient, scale)
            if steps:
                kept = values[self._accumulators[index]]
                gradient = ops.divide(ops.add(gradient, kept), steps)
            result.append(gradient)
        return result

    def _clip(self, gradients: list[Any]) -> list[Any]:
        """Clips gradients as Keras does, with norms over all parts."""
        inner = self._inner
        squares = list(self._totals)[int(self._scales_loss) :]
        if _is_on(inner.clipnorm):
            limit = inner.clipnorm
            norms = [ops.maximum(ops.sqrt(square), limit) for square in squares]
            return [
                ops.divide(ops.multiply(g, limit), ops.cast(norm, g.dtype))
                for g, norm in zip(gradients, norms, strict=True)
            ]
        if _is_on(inner.global_clipnorm):
            limit = inner.global_clipnorm
            norm = ops.sqrt(squares[0])
            scale = ops.multiply(limit, ops.minimum(1.0 / norm, 1.0 / limit))
            # NaN for a norm that is not finite, as in Keras.
            scale = ops.add(scale, ops.subtract(norm, norm))
            return [
                ops.multiply(g, ops.cast(scale, g.dtype)) for g in gradients
            ]
        if _is_on(inner.clipvalue):
            limit = inner.clipvalue
            return [ops.clip(g, -limit, limit) for g in gradients]
        return gradients

    def _is_finite(self, gradients: list[Any]) -> Any:
        return self._all_finite(self._totals)

    def _all_finite(self, totals: Sequence[Any]) -> Any:
        return ops.equal(totals[0], 0.0)


def _another(optimizer: keras.Optimizer) -> Any:
    """Returns an optimizer of the same class and settings, not built."""
    rate = learning_rate_of(optimizer)
    # A config can't hold every function, and the value of a variable is passed
    # with each update.
    set_learning_rate_of(optimizer, None)
    try:
        config = optimizer.get_config()
    finally:
        set_learning_rate_of(optimizer, rate)
    config_rate = 0.0 if isinstance(rate, keras.Variable) else rate
    return type(optimizer).from_config({**config, "learning_rate": config_rate})


def _shard_like(
    variable: keras.Variable, parts: ReplicaShard
) -> keras.Variable:
    part = keras.Variable(
        shape=parts.shard_shape,
        initializer="zeros",
        dtype=variable.dtype,
        name=variable.name,
    )
    name_like(part, variable)
    return part


def _is_on(limit: float | None) -> bool:
    return limit is not None and limit > 0


def _sum_of(tensor: object) -> Any:
    return ops.sum(ops.cast(tensor, "float32"))


def check_gradients(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[keras.Variable],
    trained: Sequence[keras.Variable],
) -> None:
    """Refuses gradients of other variables than the optimizer's `trained`."""
    known = set(map(id, trained))
    unknown = [v.path for v in variables if id(v) not in known]
    if unknown or len(gradients) != len(variables):
        raise ValueError(
            f"Optimizer '{optimizer.name}' was built for other variables.\n"
            f"Received: {len(gradients)} gradients for {len(variables)} "
            f"variables. The optimizer does not know {unknown}. Expected: "
            f"gradients of the {len(trained)} variables that it was built "
            "for, or of some of them."
        )


def check_variables(variables: Sequence[keras.Variable]) -> None:
    """Refuses variables whose update is not elementwise."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise UnsupportedModelError(
                f"Variable '{variable.path}' is overwritten with its "
                "gradient, as float8 training does.\nSuch a gradient can't be "
                "divided into parts. Received: optimizer_state='sharded'. "
                "Expected: a layer without float8 quantization, or "
                "optimizer_state='mirrored'."
            )
