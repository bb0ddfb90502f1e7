"""Training steps whose optimizers keep a part of their state on each device.

A step sees whole variables, but the compiler makes only those that it reads.
An update goes from the part of the state on each device to the new part.
"""

import contextlib
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import jax
import keras

from keras_dist.sharding.parts import Parts
from keras_dist_jax import cut
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.joined import over_replicas
from keras_dist_jax.layout import Layout
from keras_dist_jax.layout import StepFn
from keras_dist_jax.layout import StepOfParts
from keras_dist_jax.part_updates import PartUpdate
from keras_dist_jax.part_updates import part_update_of
from keras_dist_jax.partial_sums import Node
from keras_dist_jax.partial_sums import PartialSums
from keras_dist_jax.partial_sums import evaluate

_OPTIMIZER_GROUP = internals.STATE_GROUPS.index("optimizer_variables")


class ShardedSteps(StepOfParts):
    """The training step of one model, with sharded optimizer state.

    Raises:
        UnsupportedModelError: If the update of one of its optimizers takes
            whole variables.
    """

    def __init__(self, model: keras.Model, layout: Layout) -> None:
        self._model = weakref.ref(model)
        self._layout = layout
        for optimizer in self._optimizers():
            if optimizer.built:
                part_update_of(optimizer, layout)

    def of_parts(self, step: StepFn) -> StepFn:
        """See `StepOfParts.of_parts`."""

        def run(state: Any, data: Any) -> tuple[Any, Any]:
            groups = [list(group) for group in state]
            variables = self._variables()
            views = _Views(self._layout)
            old = groups[_OPTIMIZER_GROUP]
            groups[_OPTIMIZER_GROUP] = list(map(views.whole, variables, old))
            with self._updating(views):
                outputs, new = step(tuple(groups), data)
            new = [list(group) for group in new]
            if list(map(len, new)) != list(map(len, groups)):
                return outputs, new
            new[_OPTIMIZER_GROUP] = list(
                map(views.flat, variables, new[_OPTIMIZER_GROUP])
            )
            groups[_OPTIMIZER_GROUP] = old
            return outputs, self._laid(new, groups, variables)

        run.__name__ = step.__name__
        return run

    def scattered(
        self, step: Callable[..., Any], num_rows: int
    ) -> Callable[..., Any]:
        mesh = self._layout.whole.mesh
        if num_rows % mesh.size:
            return step

        def run(*args: Any) -> Any:
            closed, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
            sums = PartialSums(mesh, num_rows)
            updates = {update.name: update for update in self._updates()}

            def replaced(equation: Any, nodes: list[Node]) -> list[Any] | None:
                update = updates.get(equation.params["name"])
                if update is None:
                    return None
                return update.with_sums(nodes, sums)

            leaves = evaluate(closed, jax.tree.leaves(args), replaced)
            return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

        return run

    def _laid(self, new: Any, old: Any, variables: Any) -> list[list[Any]]:
        """Constrains a new state to the shardings that a step expects."""

        def laid(value: Any, before: Any, sharding: Any) -> Any:
            if value is before or not isinstance(value, jax.core.Tracer):
                return value
            return jax.lax.with_sharding_constraint(value, sharding)

        whole = [[self._layout.whole] * len(group) for group in new]
        whole[_OPTIMIZER_GROUP] = [
            over_replicas(self._layout)
            if cut.is_cut(variable)
            else self._layout.whole
            for variable in variables
        ]
        return [
            list(map(laid, *each)) for each in zip(new, old, whole, strict=True)
        ]

    def _optimizers(self) -> list[Any]:
        model = self._model()
        assert model is not None
        return internals.optimizers_of(model)

    def _variables(self) -> list[keras.Variable]:
        return [v for each in self._optimizers() for v in each.variables]

    def _updates(self) -> list[PartUpdate]:
        return [
            part_update_of(optimizer, self._layout)
            for optimizer in self._optimizers()
            if optimizer.built
        ]

    @contextlib.contextmanager
    def _updating(self, views: "_Views") -> Iterator[None]:
        """Replaces the updates of all optimizers, while open."""
        with contextlib.ExitStack() as stack:
            for update in self._updates():
                own = _Update(update, views)
                stack.enter_context(_replaced(update.sharded.optimizer, own))
            yield


class _Views:
    """Whole values of one step, and the flat arrays that they come from."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._flat: dict[int, tuple[Any, Any]] = {}

    def whole(self, variable: keras.Variable, flat: Any) -> Any:
        """Returns a variable's value, from its flat array if it is cut."""
        if not cut.is_cut(variable):
            return flat
        if isinstance(flat, jax.core.Tracer):
            value = self._parts(variable).join(flat)
        else:
            value = cut.whole(variable, flat)
        self._flat[id(value)] = value, flat
        return value

    def flat(self, variable: keras.Variable, value: Any) -> Any:
        """Returns a variable's flat array, from its value; undoes `whole`."""
        if not cut.is_cut(variable):
            return value
        if id(value) in self._flat:
            return self._flat[id(value)][1]
        if isinstance(value, jax.core.Tracer):
            return self._parts(variable).split(value).reshape(-1)
        return cut.flat_of(variable, value)

    def _parts(self, variable: keras.Variable) -> Parts:
        return Parts(tuple(variable.shape), self._layout.num_replicas)


class _Update:
    """Replacements for the methods of an optimizer while a step is traced."""

    def __init__(self, update: PartUpdate, views: _Views) -> None:
        self._sharded = update.sharded
        self._update = update
        self._views = views

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Replaces Keras' `stateless_apply`."""
        if not grads:
            # A model without trainable weights: nothing to update.
            return list(trainable_variables), list(optimizer_variables)
        found = self._sharded.checked(list(grads))
        return self._new(found, trainable_variables, optimizer_variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Replaces Keras' `apply`."""
        grads = list(grads)
        if not grads:
            return
        sharded = self._sharded
        found = sharded.checked(grads, trainable_variables)
        trained, state = (
            sharded.trainable_variables,
            sharded.optimizer.variables,
        )
        old = [[v.value for v in each] for each in (trained, state)]
        new = self._new(found, *old)
        for variables, values, before in zip(
            (trained, state), new, old, strict=True
        ):
            for variable, value, own in zip(
                variables, values, before, strict=True
            ):
                if value is not own:
                    variable.assign(value)

    def _new(
        self, gradients: list[Any], parameters: Any, values: Any
    ) -> tuple[list[Any], list[Any]]:
        views, variables = self._views, self._sharded.optimizer.variables
        if len(values) != len(variables):
            raise ValueError(
                "An update takes the value of each variable of its optimizer. "
                f"Received: {len(values)} values. Expected: {len(variables)}, "
                "as `optimizer.variables` has."
            )
        flats = list(map(views.flat, variables, values))
        given = jax.tree.leaves((gradients, parameters, flats))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in given):
            new, kept = self._update(gradients, parameters, flats)
        else:
            new, kept = self._update.eagerly(gradients, parameters, flats)
            jax.block_until_ready((new, kept))
        return new, list(map(views.whole, variables, kept))


@contextlib.contextmanager
def _replaced(optimizer: Any, update: _Update) -> Iterator[None]:
    attributes = vars(optimizer)
    names = ("stateless_apply", "apply")
    before = {n: attributes[n] for n in names if n in attributes}
    attributes.update({name: getattr(update, name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del attributes[name]
        attributes.update(before)
