"""A replica function in a program: traced once, for all devices."""

import contextlib
import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import keras
from jax import numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from keras_dist.plugins import RunsReplicas
from keras_dist.plugins import check_cross_replica
from keras_dist.plugins import map_nest
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.functions import agreement
from keras_dist_jax.functions.arguments import Argument
from keras_dist_jax.functions.arguments import held_arrays
from keras_dist_jax.functions.cells import Cells
from keras_dist_jax.functions.cells import cells_in
from keras_dist_jax.functions.cells import place_of
from keras_dist_jax.functions.cells import read
from keras_dist_jax.functions.cells import run
from keras_dist_jax.functions.cells import write
from keras_dist_jax.functions.replica_trace import ALL
from keras_dist_jax.functions.replica_trace import OWN
from keras_dist_jax.functions.replica_trace import ReplicaTrace
from keras_dist_jax.functions.replica_trace import TracedCall
from keras_dist_jax.functions.replica_trace import TracedRunner
from keras_dist_jax.functions.shard_updates import ShardUpdates
from keras_dist_jax.functions.structure import ARRAY_TYPES
from keras_dist_jax.functions.structure import check_constant
from keras_dist_jax.functions.tracing import Trace
from keras_dist_jax.functions.tracing import taken_cell
from keras_dist_jax.jax_internals import tracing_anew
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.placement.per_replica import JoinedPerReplica
from keras_dist_jax.programs.jaxprs import AXIS
from keras_dist_jax.programs.jaxprs import differing
from keras_dist_jax.sharding import scans
from keras_dist_jax.sharding.sharded_steps import Sharding
from keras_dist_jax.variables.bindings import is_per_replica

CUT, ON_EACH = PartitionSpec(AXIS), PartitionSpec()


def over_replicas(
    mesh: Mesh, fn: Callable[[list[Any]], Any], takes: object, gives: object
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


def run_on_all(
    strategy: RunsReplicas,
    layout: Layout,
    trace: Trace,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    sharding: Sharding | None = None,
) -> Any:
    """Traces `fn` once for all replicas, as a part of a compiled function."""
    check_cross_replica(strategy, "run")
    arguments, placeholders, leaves = held_arrays(
        (tuple(args), dict(kwargs)), layout
    )
    body = _Body(strategy, layout, trace, fn, arguments, placeholders, sharding)
    traced = body.traced(leaves)
    results = iter(traced.run(leaves))

    def result(leaf: object) -> Any:
        if leaf is not RESULT:
            return leaf
        value = next(results)
        if layout.num_replicas == 1:
            return value[0]
        return JoinedPerReplica(value, True, layout)

    return map_nest(result, traced.outline)


# A placeholder for an array in a replica function's result.
RESULT = object()


@dataclasses.dataclass(frozen=True)
class _BodyTrace:
    """A replica function, traced for all devices: a program with cells."""

    trace: Trace
    mesh: Mesh
    specs: list[PartitionSpec]  # of its arguments
    program: Any
    outline: Any
    replica_trace: ReplicaTrace
    replica_cells: Cells
    all_of: Cells
    # Whether replicas average the values of the variables that they have all
    # of: first those of `replica_cells`, then those of `all_of`.
    is_mean: list[bool]

    def run(self, leaves: list[Any]) -> list[Any]:
        """Runs the function, and assigns variables; returns its results."""
        used, written = self.replica_cells
        values = {key: self._given(v) for key, v in used.items()}
        takes = {key: self._spec(v) for key, v in used.items()}
        results, new, new_all = over_replicas(
            self.mesh,
            self._on_each_device,
            [self.specs, takes],
            (CUT, {key: takes[key] for key in written}, ON_EACH),
        )([leaves, values])
        for key, variable in written.items():
            if takes[key] == ON_EACH:
                self.trace.write(variable, new[key])
            else:
                write(taken_cell(variable), new[key])
        for key, variable in self.all_of.written.items():
            self.trace.write(variable, new_all[key])
        outputs: list[Any] = results
        return outputs

    def _given(self, variable: keras.Variable) -> Any:
        """Returns what the program takes of a variable, on all devices."""
        if self._spec(variable) == ON_EACH:
            return self.trace.read(variable)
        return read(taken_cell(variable))

    def _spec(self, variable: keras.Variable) -> PartitionSpec:
        division = self.replica_trace.divided_by(variable)
        if division is not None:
            return division.spec_of_shards
        return CUT if is_per_replica(variable) else ON_EACH

    def _on_each_device(self, arguments: list[Any]) -> Any:
        leaves, values = arguments
        used, written = self.replica_cells
        split = {
            key for key, variable in used.items() if is_per_replica(variable)
        }
        of_all = {
            key: jnp.zeros(variable.shape, internals.dtype_of(variable))
            for key, variable in self.all_of.used.items()
        }
        results, last = run(
            self.program,
            leaves,
            {
                OWN: {k: v[0] if k in split else v for k, v in values.items()},
                ALL: of_all,
            },
        )
        new = {key: last[OWN][key] for key in written}
        new_all = {key: last[ALL][key] for key in self.all_of.written}
        shared = [
            key
            for key, variable in written.items()
            if self._spec(variable) == ON_EACH
        ]
        agreed = iter(
            agreement.averaged(
                [*(new[key] for key in shared), *new_all.values()], self.is_mean
            )
        )
        new |= {key: new[key][None] for key in written if key in split}
        new |= {key: next(agreed) for key in shared}
        return (
            [jnp.asarray(value)[None] for value in results],
            new,
            {key: next(agreed) for key in new_all},
        )


@dataclasses.dataclass(frozen=True)
class _Body:
    """A replica function, to be traced for all replicas at once."""

    strategy: RunsReplicas
    layout: Layout
    trace: Trace
    fn: Callable[..., Any]
    arguments: Any
    placeholders: list[Argument]
    sharding: Sharding | None

    def traced(self, leaves: list[Any]) -> _BodyTrace:
        """Traces the function once, for all devices."""
        mesh = self.layout.replicated.mesh
        specs = [
            CUT if placeholder.is_sharded else ON_EACH
            for placeholder in self.placeholders
        ]
        kept: list[Any] = []

        def replica(leaves: list[Any]) -> list[Any]:
            replica_trace = ReplicaTrace(
                self.strategy,
                self.layout,
                self.trace,
                self.sharding is not None,
                self._runner,
            )
            outline, results = self._called(replica_trace, leaves)
            kept[:] = replica_trace, outline
            return results

        def keep(leaves: list[Any]) -> tuple[()]:
            with tracing_anew():
                kept.append(jax.make_jaxpr(replica)(leaves))
            return ()

        jax.eval_shape(over_replicas(mesh, keep, specs, ()), leaves)
        replica_trace, outline, program = kept
        replica_cells, all_of = cells_in(program, OWN), cells_in(program, ALL)
        return _BodyTrace(
            self.trace,
            mesh,
            specs,
            program,
            outline,
            replica_trace,
            replica_cells,
            all_of,
            self._means_of(program, replica_trace, replica_cells, all_of),
        )

    def _means_of(
        self,
        program: Any,
        replica_trace: ReplicaTrace,
        replica_cells: Cells,
        all_of: Cells,
    ) -> list[bool]:
        """Tells which variables replicas average, of those they have all of."""
        # With one replica a worker, values are not per-replica ones, but they
        # still differ between workers.
        is_own = self.layout.is_global and len(self.layout.devices) == 1
        arguments = [
            argument.is_sharded or is_own for argument in self.placeholders
        ]
        divided = {
            key
            for key, variable in replica_cells.used.items()
            if is_per_replica(variable)
            or replica_trace.divided_by(variable) is not None
        }
        places = [*map(place_of, program.consts)]
        constants = [role == OWN and key in divided for role, key in places]
        _, last = differing(program, arguments, constants)
        differs = dict(zip(places, last[len(arguments) :], strict=True))
        several = self.layout.num_replicas > 1
        shared = [
            (variable, several and differs[role, key])
            for role, cells in ((OWN, replica_cells), (ALL, all_of))
            for key, variable in cells.written.items()
            if role == ALL or key not in divided
        ]
        return agreement.means_of(
            [variable for variable, _ in shared],
            [differs for _, differs in shared],
        )

    def _runner(self, replica_trace: ReplicaTrace) -> TracedRunner:
        if self.sharding is None:
            return TracedRunner(replica_trace)
        return ShardUpdates(replica_trace, self.sharding)

    def _divisible(self) -> Callable[..., Any]:
        """Returns the function, with operations that logical devices divide."""
        devices = self.layout.holders
        if self.layout.num_logical > 1 and devices[0].platform == "tpu":
            return internals.with_divided_attention(self.fn)
        return self.fn

    def _called(
        self, replica_trace: ReplicaTrace, leaves: list[Any]
    ) -> tuple[Any, list[Any]]:
        """Calls the function; returns its outline and tensors."""
        remaining = iter(leaves)

        def argument(leaf: object) -> Any:
            if not isinstance(leaf, Argument):
                return leaf
            return leaf.of_replica(next(remaining))

        args, kwargs = map_nest(argument, self.arguments)
        results: list[Any] = []

        def keep(leaf: object) -> Any:
            if isinstance(leaf, keras.Variable):
                leaf = leaf.value
            if not isinstance(leaf, ARRAY_TYPES):
                check_constant(leaf)
                return leaf
            results.append(jnp.asarray(leaf))
            return RESULT

        noting = contextlib.nullcontext()
        if self.sharding is not None:
            noting = scans.noting()
        with noting, replica_trace.current(), TracedCall(replica_trace):
            outline = map_nest(keep, self._divisible()(*args, **kwargs))
            return outline, results
