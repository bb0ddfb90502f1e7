"""Replacements for the updates of optimizers while a step is traced."""

import contextlib
from abc import ABC
from abc import abstractmethod
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
    """Tells whether an equation of a program is an optimizer's update."""
    return str(equation.params.get("name")).startswith(_NAME)


class Updates(ABC):
    """Updates of optimizers in a trace, in place of Keras' own."""

    # Keras' own method runs for updates without gradients, for an optimizer
    # that is not built, and for the updates that one update is made of.

    def __init__(self) -> None:
        self._is_inside = False

    @abstractmethod
    def of_values(
        self, optimizer: Any, original: Any, state: Any, grads: Any, values: Any
    ) -> Any:
        """Replaces `stateless_apply`, which is `original`, of an optimizer."""

    @abstractmethod
    def of_variables(
        self, optimizer: Any, original: Any, grads: Any, variables: Any
    ) -> None:
        """Replaces `apply`, which is `original`, of an optimizer."""

    @contextlib.contextmanager
    def replacing(
        self, optimizers: Sequence[keras.optimizers.Optimizer]
    ) -> Iterator[None]:
        with contextlib.ExitStack() as undo:
            for optimizer in optimizers:
                undo.enter_context(self._replacing(optimizer))
            yield

    def _replacing(
        self, optimizer: Any
    ) -> contextlib.AbstractContextManager[None]:
        apply, apply_values = optimizer.apply, optimizer.stateless_apply

        def is_own(grads: list[Any]) -> bool:
            return self._is_inside or not optimizer.built or not grads

        def of_values(
            optimizer_variables: Any, grads: Any, trainable_variables: Any
        ) -> Any:
            state, grads = list(optimizer_variables), list(grads)
            args = state, grads, list(trainable_variables)
            if is_own(grads):
                return apply_values(*args)
            with internals.replaced(self, _is_inside=True):
                return self.of_values(optimizer, apply_values, *args)

        def of_variables(grads: Any, trainable_variables: Any = None) -> None:
            args = list(grads), trainable_variables
            if is_own(args[0]):
                apply(*args)
                return
            with internals.replaced(self, _is_inside=True):
                self.of_variables(optimizer, apply, *args)

        return internals.replaced(
            optimizer, apply=of_variables, stateless_apply=of_values
        )


class OptimizerCalls(Updates):
    """Makes each update one equation of a step's program, to run elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[Any, Any] = {}
        self._count = 0

    def of_values(
        self, optimizer: Any, original: Any, state: Any, grads: Any, values: Any
    ) -> Any:
        result, _ = self._called(
            (id(optimizer), "values"),
            lambda *args: (original(*args), None),
            state,
            grads,
            values,
        )
        return result

    def of_variables(
        self, optimizer: Any, original: Any, grads: Any, variables: Any
    ) -> None:
        trained = internals.trained_by(optimizer, variables)
        known = {id(v): v for v in [*optimizer.variables, *trained]}

        def update(values: Any, grads: Any) -> Any:
            pairs = zip(known.values(), values, strict=True)
            with Recording(pairs) as recording:
                original(grads, variables)
            written = recording.written
            return [value for _, value in written], [v for v, _ in written]

        values, written = self._called(
            (id(optimizer), tuple(known), variables is None),
            update,
            [variable.value for variable in known.values()],
            grads,
        )
        for variable, value in zip(written, values, strict=True):
            variable.assign(value)

    def _called(
        self, key: Any, fn: Callable[..., tuple[Any, Any]], *args: Any
    ) -> tuple[Any, Any]:
        """Calls `fn` by one equation; returns both of its results."""
        leaves, structure = jax.tree.flatten(args)
        types = [jax.typeof(leaf) for leaf in leaves]
        kinds = tuple((each.str_short(), each.weak_type) for each in types)
        key = key, structure, kinds
        found = self._known.get(key)
        if found is None:
            noted: Any = None

            def update(*args: Any) -> Any:
                nonlocal noted
                result, noted = fn(*args)
                return result

            closed, shapes = jax.make_jaxpr(update, return_shape=True)(*args)
            run = core.jaxpr_as_fun(closed)

            def named(*leaves: Any) -> Any:
                return run(*leaves)

            self._count += 1
            named.__name__ = named.__qualname__ = f"{_NAME}{self._count}"
            found = jax.jit(named), jax.tree.structure(shapes), noted
            # What closes over values of the surrounding trace can't be used in
            # another one.
            if not any(isinstance(c, jax.core.Tracer) for c in closed.consts):
                self._known[key] = found
        call, results, noted = found
        return jax.tree.unflatten(results, call(*leaves)), noted
