"""An optimizer that updates one part of each variable. Norms and checks that
need more than one element are first summed over all parts."""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_dist.errors import UnsupportedModelError
from keras_dist.internals import keras_internals
from keras_dist.sharding.parts import Parts
from keras_dist.sharding.shadow import Shadow
from keras_dist.sharding.supported import check_optimizer

Total = Callable[[list[Any]], list[Any]]


class _Current(threading.local):
    # Sums over all parts of `amounts`, during an update.
    totals: Sequence[Any] = ()
    # The current value of a learning rate that is a function.
    rate: Any = None


class ShardedOptimizer:
    """One optimizer's update of one part of each of its variables. It makes
    variables, so create it outside of traced functions."""

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, num_parts: int
    ) -> None:
        check_optimizer(optimizer)
        trained = keras_internals.trainable_variables(optimizer)
        check_variables(trained)
        self.optimizer = optimizer
        self.trainable_variables = trained
        self.parts = [Parts(tuple(v.shape), num_parts) for v in trained]
        self._shadow = Shadow(
            optimizer, trained, self.parts, self._clip, self._is_finite
        )
        self.variables = [*optimizer.variables, *self._shadow.left_out]
        self._current = _Current()

    def is_of(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Returns whether it was made for this optimizer and its variables."""
        num_known = len(self.variables) - len(self._shadow.left_out)
        known = self.variables[:num_known]
        return self.optimizer is optimizer and list(map(id, known)) == list(
            map(id, optimizer.variables)
        )

    def is_sharded(self, position: int) -> bool:
        """Returns whether `variables[position]` is in parts."""
        return position in self._shadow.slots

    def index_of(self, position: int) -> int:
        """Returns the index of the trainable variable of a slot's position."""
        return self._shadow.slots[position].index

    def parts_of(self, position: int) -> Parts:
        """Returns the `Parts` of a slot's position, those of its variable."""
        return self.parts[self.index_of(position)]

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
        found: list[Any] = [None] * len(trained)
        for gradient, variable in zip(gradients, of, strict=True):
            found[places[id(variable)]] = gradient
        return found

    def checked(
        self,
        gradients: Sequence[Any],
        variables: Sequence[keras.Variable] | None = None,
    ) -> list[Any]:
        """Aligns gradients; warns of missing ones, or raises, as Keras does."""
        found = self.aligned(gradients, variables)
        of = self.trainable_variables if variables is None else variables
        keras_internals.with_gradients(self.optimizer, gradients, of)
        return found

    def amounts(
        self, optimizer_values: Sequence[Any], gradients: Sequence[Any]
    ) -> list[Any]:
        """Returns float32 scalars of one part, to sum over all parts."""
        self._shadow.follow(self.optimizer, self._current.rate)
        inner = self._shadow.inner
        amounts = []
        if self._shadow.scales_loss:
            amounts.append(
                _sum(
                    [
                        _sum_of(ops.logical_not(ops.isfinite(g)))
                        for g in gradients
                        if g is not None
                    ]
                )
            )
        if not (_is_on(inner.clipnorm) or _is_on(inner.global_clipnorm)):
            return amounts
        squares = [
            _sum_of(ops.square(ops.cast(g, "float32")))
            for g in self._unscaled(optimizer_values, gradients)
        ]
        if not _is_on(inner.clipnorm):
            squares = [_sum(squares)]
        return amounts + squares

    def apply(
        self,
        optimizer_values: Sequence[Any],
        gradients: Sequence[Any],
        parameters: Sequence[Any],
        totals: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Updates one part, given the sums of `amounts` over all parts."""
        shadow = self._shadow
        shadow.follow(self.optimizer, self._current.rate)
        values = list(optimizer_values)
        num_given = len(values)
        missing = self.variables[num_given:]
        values += [keras_internals.value_of(v) for v in missing]
        self._current.totals = totals
        try:
            new_parameters, new_values = shadow.optimizer.stateless_apply(
                values, list(gradients), list(parameters)
            )
        finally:
            self._current.totals = ()
        return list(new_parameters), list(new_values)[:num_given]

    @contextlib.contextmanager
    def at_rate(self, rate: Any) -> Iterator[None]:
        """Uses a learning rate's value for this thread's updates inside."""
        before, self._current.rate = self._current.rate, rate
        try:
            yield
        finally:
            self._current.rate = before

    def update_in_place(
        self,
        optimizer_values: Sequence[Any],
        gradients: Sequence[Any],
        parameters: Sequence[Any],
        totals: Sequence[Any],
    ) -> None:
        """Updates one part by writing into the given tensors."""
        self._shadow.follow(self.optimizer, self._current.rate)
        self._current.totals = totals
        try:
            self._shadow.apply_to(optimizer_values, gradients, parameters)
        finally:
            self._current.totals = ()

    def stateless_apply(
        self,
        optimizer_values: Sequence[Any],
        gradients: Sequence[Any],
        parameters: Sequence[Any],
        total: Total,
    ) -> tuple[list[Any], list[Any]]:
        """Updates one part, of tensors of shape `(size,)`; `total` sums scalars
        over all parts. Returns the new parameters and optimizer values."""
        amounts = self.amounts(optimizer_values, gradients)
        totals = total(amounts) if amounts else []
        return self.apply(optimizer_values, gradients, parameters, totals)

    def constrain(self, index: int, value: Any) -> Any:
        """Applies a trainable variable's constraint to its whole new value."""
        constraint = self.trainable_variables[index].constraint
        return value if constraint is None else constraint(value)

    def _unscaled(
        self, values: Sequence[Any], gradients: Sequence[Any]
    ) -> list[Any]:
        """Returns the gradients that are clipped in a step that updates."""
        shadow, inner = self._shadow, self._shadow.inner
        scale = inner.loss_scale_factor
        if shadow.scales_loss:
            scale = values[shadow.position_of_scale]
        steps = inner.gradient_accumulation_steps
        result = []
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if scale is not None:
                gradient = ops.divide(gradient, scale)
            if steps:
                kept = values[shadow.accumulators[index]]
                gradient = ops.divide(ops.add(gradient, kept), steps)
            result.append(gradient)
        return result

    def _clip(self, gradients: list[Any]) -> list[Any]:
        """Clips gradients as Keras does, with norms over all parts."""
        inner = self._shadow.inner
        squares = list(self._current.totals)[int(self._shadow.scales_loss) :]
        if _is_on(inner.clipnorm):
            return [
                ops.divide(
                    ops.multiply(g, inner.clipnorm),
                    ops.cast(
                        ops.maximum(ops.sqrt(square), inner.clipnorm), g.dtype
                    ),
                )
                for g, square in zip(gradients, squares, strict=True)
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
        return ops.equal(self._current.totals[0], 0.0)


def _is_on(limit: float | None) -> bool:
    return limit is not None and limit > 0


def _sum_of(tensor: Any) -> Any:
    return ops.sum(ops.cast(tensor, "float32"))


def _sum(scalars: list[Any]) -> Any:
    return ops.sum(ops.stack(scalars))


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
            f"Optimizer '{optimizer.name}' was built for other variables. "
            f"Received: {len(gradients)} gradients for {len(variables)} "
            f"variables, of which it does not know {unknown}. Expected: "
            f"gradients of the {len(trained)} variables that it was built "
            "for, or of some of them."
        )


def check_variables(variables: Sequence[keras.Variable]) -> None:
    """Refuses variables whose update is not elementwise."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise UnsupportedModelError(
                f"Variable '{variable.path}' is overwritten with its "
                "gradient, as float8 training does, which has no parts. "
                "Received: optimizer_state='sharded'. Expected: a layer "
                "without float8 quantization, or optimizer_state='mirrored'."
            )
