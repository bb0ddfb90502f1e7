"""Replica functions whose optimizers update variables in parts.

Inside of a region, each device would update whole variables. So a function's
program is cut at its updates: what is between them runs in regions, and the
updates run outside of these, where the compiler divides them.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import keras
from jax.extend.core import Literal
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from keras_dist.internals.keras_optimizers import with_gradients
from keras_dist.plugin.powers import UpdatesParts
from keras_dist.replica.scopes import Recording
from keras_dist_jax import jaxprs
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.agreement import given
from keras_dist_jax.jax_internals import opened
from keras_dist_jax.jax_internals import with_parts
from keras_dist_jax.jaxprs import AXIS
from keras_dist_jax.jaxprs import variables
from keras_dist_jax.regions import Region
from keras_dist_jax.regions import TracedRunner
from keras_dist_jax.sharded_steps import Sharding
from keras_dist_jax.sharded_steps import state_of

CUT, ON_EACH = PartitionSpec(AXIS), PartitionSpec()
_NAME = "keras_dist_update_"


def over_replicas(
    mesh: Mesh, fn: Callable[[list[Any]], Any], takes: Any, gives: Any
) -> Callable[[list[Any]], Any]:
    """Makes a function run for each replica, with its own arguments."""
    # The compiler divides what is along the other axes of the mesh.
    mapped: Callable[[list[Any]], Any] = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=(takes,),
        out_specs=gives,
        axis_names={AXIS},
        check_vma=False,
    )
    return mapped


class NotedUpdate(NamedTuple):
    """An update that is one equation of a replica function's program."""

    optimizer: Any
    # What it may read or write, and what it writes; the equation takes the
    # values of the former, and the gradients, and gives those of the latter.
    state: list[keras.Variable]
    written: list[keras.Variable]
    trained: list[keras.Variable]


def is_update(equation: Any) -> bool:
    """Tells whether an equation of a program is a noted update."""
    return str(equation.params.get("name")).startswith(_NAME)


class RegionUpdates:
    """The updates of a replica function."""

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._noted: dict[str, NotedUpdate] = {}

    def call(
        self,
        name: str,
        optimizer: Any,
        gradients: Sequence[Any],
        trained: list[keras.Variable],
    ) -> None:
        """Updates variables, by one equation of that name."""
        state = state_of(optimizer, trained)
        written: list[keras.Variable] = []

        def update(values: list[Any], gradients: list[Any]) -> list[Any]:
            with Recording(zip(state, values, strict=True)) as recording:
                optimizer.apply(gradients, trained)
            written[:] = [variable for variable, _ in recording.written]
            return [value for _, value in recording.written]

        update.__name__ = update.__qualname__ = name
        values = [variable.value for variable in state]
        new = jax.jit(update)(values, list(gradients))
        self._noted[name] = NotedUpdate(optimizer, state, written, trained)
        for variable, value in zip(written, new, strict=True):
            variable.assign(value)

    def runner(self, region: Region) -> TracedRunner:
        """Makes the runner of a region whose updates are noted here."""
        return UpdatingRunner(region, self)

    def segments(
        self,
        program: Any,
        mesh: Mesh,
        specs: Sequence[PartitionSpec],
        is_cut: Sequence[bool],
        are_parts: Sequence[bool],
    ) -> "Segments | None":
        """Cuts a program at its updates; `None` without any.

        Args:
            program: The program of a replica function.
            mesh: The mesh of the replicas.
            specs: Sequence of a `PartitionSpec` for each of its arguments.
            is_cut: Sequence of booleans, true for those of the arguments that
                differ between replicas.
            are_parts: Sequence of booleans, true for variables in parts.
        """
        differs = jaxprs.differing_in(program, is_cut)
        pairs = zip(opened(program).invars, are_parts, strict=True)
        parts = {var for var, is_part in pairs if is_part}
        found = Segments(program, mesh, specs, differs, parts, self._sharding)
        own: list[Any] = []
        for equation in opened(program).eqns:
            noted = self._of(equation)
            taken = variables(equation.invars)
            if noted is None or not differs.isdisjoint(taken):
                own.append(equation)
            else:
                found.updates.append((own, equation, noted))
                own = []
        found.rest = own
        return found if found.updates else None

    def _of(self, equation: Any) -> NotedUpdate | None:
        """Returns the update that an equation is, if it can run elsewhere."""
        found = self._noted.get(str(equation.params.get("name")))
        if found is None or jaxprs.meets_inside(equation):
            return None
        # JAX leaves out results that are arguments, and adds arguments for
        # values that the update takes from around it.
        takes = len(found.state) + len(found.trained)
        is_whole = len(equation.invars) == takes and (
            len(equation.outvars) == len(found.written)
        )
        return found if is_whole else None


class UpdatingRunner(TracedRunner, UpdatesParts):
    """The runner of a region whose optimizers update variables in parts."""

    def __init__(self, region: Region, updates: RegionUpdates) -> None:
        super().__init__(region)
        self._updates = updates
        self._count = 0

    def update_parts(
        self,
        optimizer: Any,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable] | None,
    ) -> None:
        trained = internals.trained_by(optimizer, variables)
        sums = self.summed(gradients[0])
        summed, trained = with_gradients(optimizer, sums, trained)
        # The variants of a function count alike.
        self._count += 1
        name = f"{_NAME}{self._count}"
        self._updates.call(name, optimizer, summed, trained)


class _Held(NamedTuple):
    """A value outside of regions."""

    array: Any
    spec: PartitionSpec = ON_EACH
    # Whether it has an axis for replicas in front, which they don't see.
    is_stacked: bool = False


class Segments:
    """A replica function's program, cut at its updates."""

    def __init__(
        self,
        program: Any,
        mesh: Mesh,
        specs: Sequence[PartitionSpec],
        differs: set[Any],
        parts: set[Any],
        sharding: Sharding,
    ) -> None:
        self._program, self._mesh = program, mesh
        # What regions gather, by the part of each replica.
        self._gathered = {
            equation.outvars[0]: equation.invars[0]
            for equation in opened(program).eqns
            if equation.primitive.name == "all_gather"
            and equation.invars[0] in parts
        }
        # How regions take the program's arguments, and the values in it that
        # may differ between replicas.
        self._specs, self._differs = specs, differs
        self._sharding = sharding
        # The equations before each update, and the update's.
        self.updates: list[tuple[list[Any], Any, NotedUpdate]] = []
        self.rest: list[Any] = []

    def run(
        self,
        arguments: Sequence[Any],
        each: list[Any],
        whole: list[Any],
        differ: Sequence[bool],
    ) -> tuple[list[Any], list[Any]]:
        """Runs the program.

        Args:
            arguments: Sequence of the program's arguments.
            each: List of results that each replica has its own of.
            whole: List of other results.
            differ: Sequence of booleans, true for those of `whole` of which
                replicas have different values.

        Returns:
            The values of `each`, with an axis for replicas, and of `whole`.
        """
        jaxpr = opened(self._program)
        inputs = zip(jaxpr.invars, arguments, self._specs, strict=True)
        held = {var: _Held(array, spec) for var, array, spec in inputs}
        # Outside of regions, each of these is the variable's array.
        for var, part in self._gathered.items():
            held[var] = _Held(held[part].array)
        # What each part of the program takes from those before it.
        later = set(variables([*each, *whole])) | jaxprs.taken(self.rest)
        needed = []
        for equations, update, _ in reversed(self.updates):
            later |= set(variables(update.invars))
            needed.append(set(later))
            later |= jaxprs.taken(equations)
        for equations, update, noted in self.updates:
            self._run(equations, held, needed.pop())
            held |= self._updated(update, noted, held)
        return self._finish(held, each, whole, differ)

    def _run(
        self, equations: list[Any], held: dict[Any, _Held], needed: set[Any]
    ) -> None:
        """Runs equations on each device; adds what is needed of them."""
        needed = needed - held.keys()
        made = [v for e in equations for v in e.outvars if v in needed]
        own = [v in self._differs for v in made]

        def stacked(values: list[Any]) -> list[Any]:
            pairs = zip(values, own, strict=True)
            return [value[None] if is_own else value for value, is_own in pairs]

        specs = [CUT if is_own else ON_EACH for is_own in own]
        arrays = self._region(equations, held, made, stacked, specs)
        held.update(zip(made, map(_Held, arrays, specs, own), strict=True))

    def _updated(
        self, update: Any, noted: NotedUpdate, held: Mapping[Any, _Held]
    ) -> dict[Any, _Held]:
        """Runs an update outside of regions; returns the values it gives."""
        arrays = {var: each.array for var, each in held.items()}
        values = [jaxprs.value_of(atom, arrays) for atom in update.invars]
        count = len(noted.state)
        new = self._sharding.applied(
            noted.optimizer,
            noted.state,
            values[:count],
            values[count:],
            noted.trained,
        )
        pairs = zip(update.outvars, noted.written, strict=True)
        return {var: _Held(new[id(variable)]) for var, variable in pairs}

    def _finish(
        self,
        held: Mapping[Any, _Held],
        each: list[Any],
        whole: list[Any],
        differ: Sequence[bool],
    ) -> tuple[list[Any], list[Any]]:
        # What replicas share outside of regions stays there, in parts.
        shared = {v for v, each in held.items() if each.spec == ON_EACH}
        is_here = [not isinstance(v, Literal) and v in shared for v in whole]
        others = [v for v, here in zip(whole, is_here, strict=True) if not here]
        of = [d for d, here in zip(differ, is_here, strict=True) if not here]
        count = len(each)

        def give(values: list[Any]) -> Any:
            return given(values[:count], values[count:], of)

        stacked, rest = self._region(
            self.rest, held, [*each, *others], give, (CUT, ON_EACH)
        )
        left = iter(rest)
        return stacked, [
            held[atom].array if here else next(left)
            for atom, here in zip(whole, is_here, strict=True)
        ]

    def _region(
        self,
        equations: list[Any],
        held: Mapping[Any, _Held],
        results: Sequence[Any],
        give: Callable[[list[Any]], Any],
        specs: Any,
    ) -> Any:
        """Runs equations on each device; returns what `give` makes there."""
        equations = jaxprs.live(equations, results)
        made = {v for equation in equations for v in equation.outvars}
        needed = jaxprs.taken(equations) | set(variables(results))
        taken = [var for var in held if var in needed - made]
        part = with_parts(
            self._program,
            invars=taken,
            outvars=list(results),
            eqns=equations,
            effects=frozenset().union(*(e.effects for e in equations)),
            debug_info=opened(self._program).debug_info.with_unknown_names(),
        )
        inputs = [held[var] for var in taken]

        def on_each_device(arrays: list[Any]) -> Any:
            own = [
                array[0] if each.is_stacked else array
                for each, array in zip(inputs, arrays, strict=True)
            ]
            return give(jax.core.eval_jaxpr(opened(part), part.consts, *own))

        arrays = [each.array for each in inputs]
        own = [each.spec for each in inputs]
        return over_replicas(self._mesh, on_each_device, own, specs)(arrays)
