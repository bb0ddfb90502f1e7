"""Optimizer updates of a step, as one equation of its program each.

While a step is traced, its optimizers' `apply` and `stateless_apply` are
replaced, on the instances, by one call of a compiled function. So the program
shows the inputs and outputs of an update, which may then run elsewhere.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import jax
import keras
from jax.extend import core

from keras_dist.replica.scopes import Recording
from keras_dist_jax import keras_internals as internals

_NAME = "optimizer_update_"


def is_update(equation: Any) -> bool:
    """Tells whether an equation of a program is an optimizer's update.

    Equal updates of one `OptimizerCalls` have the same name.
    """
    return str(equation.params.get("name")).startswith(_NAME)


class OptimizerCalls:
    """Updates of optimizers, each traced once for each kind of arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self._is_inside = False
        self._count = 0

    @contextlib.contextmanager
    def marked(
        self, optimizers: Sequence[keras.optimizers.Optimizer]
    ) -> Iterator[None]:
        """Makes each update of these optimizers one call, while open."""
        with contextlib.ExitStack() as undo:
            for optimizer in optimizers:
                undo.enter_context(
                    replaced(optimizer, "stateless_apply", self._of_values)
                )
                undo.enter_context(
                    replaced(optimizer, "apply", self._of_variables)
                )
            yield

    def _of_values(
        self, optimizer: keras.optimizers.Optimizer, original: Any
    ) -> Callable[..., Any]:
        def stateless_apply(
            optimizer_variables: Any, grads: Any, trainable_variables: Any
        ) -> Any:
            if self._is_inside:
                return original(optimizer_variables, grads, trainable_variables)
            result, _ = self._called(
                (id(optimizer), "values"),
                lambda *args: (original(*args), None),
                list(optimizer_variables),
                list(grads),
                list(trainable_variables),
            )
            return result

        return stateless_apply

    def _of_variables(
        self, optimizer: keras.optimizers.Optimizer, original: Any
    ) -> Callable[..., Any]:
        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            if self._is_inside or not optimizer.built or not grads:
                return original(grads, trainable_variables)
            trained = internals.trained_by(optimizer, trainable_variables)
            known = {id(v): v for v in [*optimizer.variables, *trained]}
            variables = list(known.values())

            def update(values: Any, grads: Any) -> Any:
                pairs = zip(variables, values, strict=True)
                with Recording(pairs) as recording:
                    original(grads, trainable_variables)
                written = recording.written
                return [value for _, value in written], [v for v, _ in written]

            values, written = self._called(
                (id(optimizer), tuple(known), trainable_variables is None),
                update,
                [variable.value for variable in variables],
                grads,
            )
            for variable, value in zip(written, values, strict=True):
                variable.assign(value)
            return None

        return apply

    def _called(
        self, key: Any, fn: Callable[..., tuple[Any, Any]], *args: Any
    ) -> tuple[Any, Any]:
        """Calls `fn` by one equation; returns both of its results."""
        leaves, structure = jax.tree.flatten(args)
        kinds = tuple(jax.typeof(leaf).str_short() for leaf in leaves)
        weak = tuple(jax.typeof(leaf).weak_type for leaf in leaves)
        key = key, structure, kinds, weak
        if key not in self._known:
            traced, can_be_kept = self._traced(fn, args)
            if not can_be_kept:
                call, _, noted = traced
                return call(*args), noted()
            self._known[key] = traced
        call, results, noted = self._known[key]
        return jax.tree.unflatten(results, call(*leaves)), noted()

    def _traced(
        self, fn: Callable[..., tuple[Any, Any]], args: Any
    ) -> tuple[Any, bool]:
        notes: list[Any] = []

        def update(*args: Any) -> Any:
            self._is_inside = True
            try:
                result, noted = fn(*args)
            finally:
                self._is_inside = False
            notes.append(noted)
            return result

        def last() -> Any:
            return notes[-1]

        self._count += 1
        update.__name__ = update.__qualname__ = f"{_NAME}{self._count}"
        closed, shapes = jax.make_jaxpr(update, return_shape=True)(*args)
        if any(isinstance(c, jax.core.Tracer) for c in closed.consts):
            # It closes over values of the surrounding trace, and can't be used
            # in another one.
            return (jax.jit(update), None, last), False
        call = core.jaxpr_as_fun(closed)

        def known(*leaves: Any) -> Any:
            return call(*leaves)

        known.__name__ = known.__qualname__ = update.__name__
        return (jax.jit(known), jax.tree.structure(shapes), last), True


@contextlib.contextmanager
def replaced(
    optimizer: Any, name: str, hook: Callable[[Any, Any], Any]
) -> Iterator[None]:
    """Replaces a method of one optimizer by `hook(optimizer, method)`."""
    attributes = vars(optimizer)  # Keras tracks what is set otherwise
    own = name in attributes
    original = getattr(optimizer, name)
    attributes[name] = hook(optimizer, original)
    try:
        yield
    finally:
        if own:
            attributes[name] = original
        else:
            del attributes[name]
