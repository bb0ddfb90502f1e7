"""Updates of optimizers that a step leaves to the devices of the variables.

While the step is traced, an update gives placeholders in place of new values. A
step that computes with one of them fails, and can't leave its updates.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

import jax
from jax import numpy as jnp
from jax.extend.core import Literal

from keras_dist.plugins import Recording
from keras_dist.plugins import stateless_scope
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.jax_internals import opened
from keras_dist_jax.machine import described
from keras_dist_jax.machine import is_described
from keras_dist_jax.programs import jaxprs
from keras_dist_jax.updates import Updates


class Pending:
    """Stands for a new value of a variable, which is computed elsewhere."""

    def __init__(self, update: "Update", index: int, like: Any) -> None:
        self.update, self.index = update, index
        self.shape, self.dtype = like.shape, like.dtype

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError("A step uses a value that its update gives.")

    # JAX refuses the rest.
    __array__ = __bool__ = __eq__ = _refuse
    __hash__ = object.__hash__


class Update:
    """An update of a step, as a program that was traced beside it.

    Args:
        program: The program, with constants as its last arguments.
        given: List of what it takes in the step.
    """

    def __init__(self, program: object, given: list[Any]) -> None:
        self.program, self.given = program, given
        # By position in `given`: the position in the step's state, or among
        # the values that the step hands over. The rest are constants.
        self.state: dict[int, int] = {}
        self.crossing: dict[int, int] = {}
        # By position in the state: the index of the new value.
        self.results: dict[int, int] = {}

    def new_values(self) -> list[Any]:
        """Returns the results; those that are computed are placeholders."""
        known = dict(zip(self._taken(), self.given, strict=True))
        return [
            jaxprs.value_of(var, known)
            if isinstance(var, Literal) or var in known
            else Pending(self, index, var.aval)
            for index, var in enumerate(opened(self.program).outvars)
        ]

    def find(self, state: Sequence[Any], crossing: list[Any]) -> None:
        """Notes where what it takes is; appends the rest to `crossing`."""
        places = {id(value): place for place, value in enumerate(state)}
        for position, value in enumerate(self.given):
            if id(value) in places:
                self.state[position] = places[id(value)]
            elif isinstance(value, jax.core.Tracer):
                self.crossing[position] = len(crossing)
                crossing.append(value)
        # The trace ends.
        self.given = [
            described(value) if isinstance(value, jax.core.Tracer) else value
            for value in self.given
        ]

    def constants(self) -> list[Any]:
        """Returns what it takes from neither the state nor the step."""
        return [
            value
            for position, value in enumerate(self.given)
            if position not in self.state and position not in self.crossing
        ]

    def needed(self, positions: Collection[int]) -> list[int]:
        """Returns the positions in `given` that some new values depend on."""
        jaxpr = opened(self.program)
        outvars = [jaxpr.outvars[self.results[p]] for p in positions]
        equations = jaxprs.live(jaxpr.eqns, outvars)
        used = set(jaxprs.variables(outvars)) | jaxprs.taken(equations)
        return [i for i, var in enumerate(self._taken()) if var in used]

    def run(
        self, given: dict[int, Any], positions: Collection[int]
    ) -> list[Any]:
        """Computes the new values at some positions of the state."""
        values = [
            given[position]
            if position in given
            else jnp.zeros(value.shape, value.dtype)  # it makes no difference
            if is_described(value)
            else value
            for position, value in enumerate(self.given)
        ]
        count = len(opened(self.program).invars)
        new = jax.core.eval_jaxpr(
            opened(self.program), values[count:], *values[:count]
        )
        selected = [new[self.results[position]] for position in positions]
        return [jax.lax.convert_element_type(v, v.dtype) for v in selected]

    def _taken(self) -> list[Any]:
        jaxpr = opened(self.program)
        return [*jaxpr.invars, *jaxpr.constvars]


class Postponed(Updates):
    """The updates of one step, noted in place of being computed."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[Update] = []
        # By optimizer and kinds of values: an update that was traced.
        self._known: dict[Any, tuple[Any, Any, Any]] = {}

    def of_values(
        self, optimizer: Any, original: Any, state: Any, grads: Any, values: Any
    ) -> Any:
        result, _ = self._noted(
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

        values, written = self._noted(
            (id(optimizer), tuple(known), variables is None),
            update,
            [variable.value for variable in known.values()],
            grads,
        )
        scope = stateless_scope()
        assert scope is not None  # that of the step
        for variable, value in zip(written, values, strict=True):
            scope.add_update((variable, value))

    def _noted(
        self, key: object, fn: Callable[..., tuple[Any, Any]], *args: Any
    ) -> tuple[Any, Any]:
        """Traces an update; returns placeholders, and `fn`'s second result."""
        leaves, structure = jax.tree.flatten(args)
        types = [jax.typeof(leaf) for leaf in leaves]
        kinds = tuple((aval.str_short(), aval.weak_type) for aval in types)
        key = key, structure, kinds
        if key in self._known:
            program, result, noted = self._known[key]
        else:
            noted = None

            def update(*args: Any) -> Any:
                nonlocal noted
                result, noted = fn(*args)
                return result

            program, shapes = jax.make_jaxpr(update, return_shape=True)(*args)
            result = jax.tree.structure(shapes)
            # What closes over values of the surrounding trace can't be used in
            # another one.
            if not any(isinstance(c, jax.core.Tracer) for c in program.consts):
                self._known[key] = program, result, noted
        self.updates.append(Update(program, [*leaves, *program.consts]))
        return result.unflatten(self.updates[-1].new_values()), noted
