"""`strategy.run` in the midst of a program: one body, run by all replicas."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any
from typing import TypeVar

import jax
import keras
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec
from keras import ops

from keras_dist import context
from keras_dist.errors import ReplicaDivergenceError
from keras_dist.errors import UnsupportedModelError
from keras_dist.reduction import ReduceOp
from keras_dist.reduction import check_gather
from keras_dist.regroup import map_nest
from keras_dist.training.binding import check_owner
from keras_dist.training.call import ReplicaCall
from keras_dist.training import seams
from keras_dist.training.overlay import Overlay
from keras_dist.training.overlay import opened
from keras_dist.training.replica import SEED_STRIDE
from keras_dist.training.replica import Replica
from keras_dist.training.replica import ReplicaRunner
from keras_dist.training.shares import WHOLE
from keras_dist.training.shares import Share
from keras_dist.training.step import Writes
from keras_dist.training.step import outside_replicas
from keras_dist.values import PerReplica
from keras_dist_jax.divergence import AXIS
from keras_dist_jax.divergence import differing
from keras_dist_jax.joined import JoinedPerReplica
from keras_dist_jax.joined import Local
from keras_dist_jax.layout import Layout
from keras_dist_jax.layout import default_device
from keras_dist_jax.tracing import Trace
from keras_dist_jax.tracing import combined
from keras_dist_jax.tracing import eagerly
from keras_dist_jax.tracing import is_split
from keras_dist_jax.tracing import share_of

if TYPE_CHECKING:
    from keras_dist.strategy_base import StrategyBase

T = TypeVar("T")
CUT, ON_EACH = PartitionSpec(AXIS), PartitionSpec()


class Region:
    """What one replica reads and writes in a body that all of them run.

    Args:
        strategy: The `Strategy`.
        layout: Its `Layout`.
        trace: The `Trace` that it is part of.
        values: Mapping from variables' ids to the replica's values.
    """

    def __init__(
        self,
        strategy: "StrategyBase",
        layout: Layout,
        trace: Trace,
        values: Mapping[int, Any],
    ) -> None:
        self.strategy = strategy
        self.layout = layout
        self.trace = trace
        self.count = len(layout.devices)
        self.index = lax.axis_index(AXIS)
        self.values = dict(values)
        self.written: dict[int, keras.Variable] = {}
        self.scope = RegionScope(self)
        # By the id of a component that was gathered: all, and its own.
        self._gathered: dict[int, tuple[list[Any], Any]] = {}

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """While it is traced, it is what `current_region` gives."""
        before, self.trace.region = self.trace.region, self
        try:
            yield
        finally:
            self.trace.region = before

    def read(self, variable: keras.Variable) -> Any:
        """The replica's value of a variable, or `None` if it has none yet."""
        check_owner(variable, self.strategy)
        key = id(variable)
        if key not in self.values:
            value = self.trace.read(variable)
            if value is None:
                return None
            if is_split(variable):
                value = lax.dynamic_index_in_dim(
                    value, self.index, keepdims=False
                )
            self.values[key] = value
        self.trace.variables[key] = variable
        return self.values[key]

    def write(self, variable: keras.Variable, value: Any) -> None:
        """Replaces the replica's value of a variable."""
        check_owner(variable, self.strategy)
        self.values[id(variable)] = value
        self.written[id(variable)] = variable

    def everyone(self, nest: Any) -> list[Any]:
        """Every replica's nest; what is not traced is the same on each."""
        leaves, structure = jax.tree.flatten(nest)
        gathered = [self._gather(leaf) for leaf in leaves]
        return [
            structure.unflatten([each[i] for each in gathered])
            for i in range(self.count)
        ]

    def _gather(self, leaf: Any) -> list[Any]:
        if not isinstance(leaf, jax.Array):
            return [leaf] * self.count
        joined = lax.all_gather(leaf, AXIS)
        components = [joined[index] for index in range(self.count)]
        self._gathered[id(components[0])] = components, leaf
        return components

    def per_replica(self, values: Sequence[Any]) -> PerReplica:
        """Components, with what is this replica's own if that is known."""
        components, local = self._gathered.get(id(values[0]), ([], None))
        if len(components) == len(values) and all(
            a is b for a, b in zip(components, values, strict=True)
        ):
            return Local(local, values)
        return PerReplica(values)

    def combine(self, op: ReduceOp, values: Sequence[Any]) -> Any:
        """Components combined by a collective, or `None` if they are not
        what was gathered."""
        known = self.per_replica(values)
        collective = _COLLECTIVES.get(op)
        if not isinstance(known, Local) or collective is None:
            return None
        local = known.local
        if op is ReduceOp.MEAN:
            local = ops.true_divide(local, 1)  # a mean of integers is a float
        return collective(local, AXIS)

    def own(self, nest: Any) -> Any:
        """This replica's component of each per-replica value of a nest."""

        def pick(leaf: Any) -> Any:
            if isinstance(leaf, Local):
                return leaf.local
            if not isinstance(leaf, PerReplica):
                return leaf
            return lax.dynamic_index_in_dim(
                jnp.stack(leaf.values), self.index, keepdims=False
            )

        return map_nest(pick, nest)


class RegionScope(Overlay):
    """Cross-replica context inside of a region: in its meetings."""

    def __init__(self, region: Region) -> None:
        super().__init__(eagerly=eagerly)
        self.below = None
        self._region = region

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = self._region.read(variable)
        if value is None or not is_split(variable):
            return value
        return combined(variable, self._region.everyone(value))

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        region = self._region
        if is_split(variable):
            value = lax.select_n(
                region.index,
                *[
                    jnp.asarray(share_of(variable, value, i, region.count))
                    for i in range(region.count)
                ],
            )
        region.write(variable, value)

    def forget(self, variable: keras.Variable) -> None:
        """Nothing is kept here."""


_COLLECTIVES = {
    ReduceOp.SUM: lax.psum,
    ReduceOp.MEAN: lax.pmean,
    ReduceOp.MIN: lax.pmin,
    ReduceOp.MAX: lax.pmax,
}


class _OwnList(list[Any]):
    """Values that stay with whoever has them: meetings don't gather them."""


class _OwnWrites(dict[int, tuple[Any, Any]]):
    """The same for assignments."""


class TracedReplica(Replica):
    """All replicas, as one of which nobody knows which it is."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.index, WHOLE)  # type: ignore[arg-type]
        self._region = region

    def meet(self, what: str, fn: Callable[[list[Any]], T], value: Any) -> T:
        everyone = self._region.everyone(value)
        with outside_replicas(), opened(self._region.scope):
            return fn(everyone)

    def all_sum(self, what: str, value: Any, total: Any = None) -> Any:
        @jax.custom_vjp
        def summed(value: Any) -> Any:
            return lax.psum(value, AXIS) if total is None else total

        def forward(value: Any) -> tuple[Any, None]:
            return summed(value), None

        def backward(_: None, gradient: Any) -> tuple[Any]:
            return (self.all_sum(f"the gradient of {what}", gradient),)

        summed.defvjp(forward, backward)
        return summed(value)

    def all_gather(self, what: str, value: Any, axis: int) -> Any:
        along = check_gather([value], axis)
        return lax.all_gather(value, AXIS, axis=along, tiled=True)

    def own(self, nest: Any) -> Any:
        return self._region.own(nest)

    @property
    def seed_offset(self) -> Any:
        stride = jnp.uint32(SEED_STRIDE)
        return (self._region.index.astype("uint32") * stride) % 2**31

    def read(self, variable: keras.Variable) -> Any:
        return self._region.read(variable)

    def hold(self, variable: keras.Variable, value: Any) -> Any:
        return value


class TracedRunner(ReplicaRunner):
    """What a region's meetings need of a runner."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def call(self, fn: Callable[[Replica], T]) -> list[T]:
        raise UnsupportedModelError(
            "`strategy.extended.update` can't be part of a compiled function "
            "on JAX. Assign to the variable in `merge_call` instead, or run "
            "the function without `keras_dist.function`."
        )

    def weighted_sum(
        self, gradients: Sequence[Sequence[Any]], weights: Sequence[Any]
    ) -> list[Any]:
        own = gradients[0]
        sums = iter(lax.psum([g for g in own if g is not None], AXIS))
        return [None if g is None else next(sums) for g in own]

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        device = default_device(self._region.layout.devices[0])
        with opened(None), eagerly(), device:
            yield


class TracedCall(ReplicaCall):
    """A replica function of a region: one of all, whichever it is."""

    replica: TracedReplica

    def __init__(
        self,
        replica: TracedReplica,
        runner: ReplicaRunner,
        strategy: "StrategyBase",
        region: Region,
    ) -> None:
        super().__init__(replica, runner, strategy)
        self._region = region
        self.writes = _OwnWrites()

    def read(self, variable: keras.Variable) -> Any:
        return self._region.read(variable)

    def write(self, variable: keras.Variable, value: Any) -> None:
        check_owner(variable, self.strategy)
        self.scope.state_mapping[id(variable)] = value
        self.writes[id(variable)] = (variable, value)

    def of_its_own(self, values: list[Any]) -> list[Any]:
        return _OwnList(values)

    def commit(self, writes: Sequence[Writes], shares: Sequence[Share]) -> None:
        for variable, value in writes[0].values():
            self._region.write(variable, value)

    def sum_gradients(
        self, gradients: Sequence[Sequence[Any]], shares: Sequence[Share]
    ) -> list[Any]:
        return self.runner.weighted_sum(gradients, [])


def run_region(
    strategy: "StrategyBase",
    layout: Layout,
    trace: Trace,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Calls `fn` in a body that each replica runs.

    Args:
        strategy: The `Strategy`.
        layout: Its `Layout`.
        trace: The `Trace` that it is part of.
        fn: Callable, the replica function.
        args: Sequence of arguments, with tracers for arrays.
        kwargs: Mapping of keyword arguments, likewise.

    Returns:
        Nest of `JoinedPerReplica`s.
    """
    context.check_cross_replica(strategy, "run")
    seams.install()
    seams.install_building()
    leaves: list[Any] = []
    specs: list[Any] = []

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, JoinedPerReplica):
            leaves.append(leaf.joined)
            specs.append(CUT)
            return _Argument(leaf.stacked)
        if isinstance(leaf, PerReplica):
            leaves.append(jnp.stack(leaf.values))
            specs.append(CUT)
            return _Argument(True)
        if isinstance(leaf, jax.Array):
            leaves.append(leaf)
            specs.append(ON_EACH)
            return _Argument(False)
        return leaf

    arguments = map_nest(collect, (tuple(args), dict(kwargs)))
    known = [v for k, v in trace.variables.items() if k in trace.values]
    body = _Body(strategy, layout, trace, fn, arguments, known, specs)
    values = [trace.values[id(variable)] for variable in known]
    results, split, whole = jax.shard_map(
        body,
        mesh=layout.sharding.mesh,
        in_specs=(specs, [CUT if is_split(v) else ON_EACH for v in known]),
        out_specs=(CUT, CUT, ON_EACH),
        check_vma=False,
    )(leaves, values)
    for variable, value in zip(body.written, [*split, *whole], strict=True):
        trace.write(variable, value)
    joined = iter(results)
    return map_nest(
        lambda leaf: JoinedPerReplica(next(joined), True, layout)
        if leaf is _RESULT
        else leaf,
        body.result,
    )


class _Argument:
    """Stands for an array among the arguments of a replica function."""

    def __init__(self, stacked: bool) -> None:
        self.stacked = stacked


_RESULT = object()


class _Body:
    """What each device runs: the replica function, once for all of them."""

    def __init__(
        self,
        strategy: "StrategyBase",
        layout: Layout,
        trace: Trace,
        fn: Callable[..., Any],
        arguments: Any,
        known: Sequence[keras.Variable],
        specs: Sequence[Any],
    ) -> None:
        self._strategy = strategy
        self._layout = layout
        self._trace = trace
        self._fn = fn
        self._arguments = arguments
        self._known = known
        self._differ = [
            *[spec is CUT for spec in specs],
            *[is_split(variable) for variable in known],
        ]
        self.result: Any = None
        self.written: list[keras.Variable] = []

    def __call__(self, leaves: list[Any], values: list[Any]) -> Any:
        program, shapes = jax.make_jaxpr(self._replica, return_shape=True)(
            leaves, values
        )
        flat = jax.core.eval_jaxpr(
            program.jaxpr, program.consts, *leaves, *values
        )
        structure = jax.tree.structure(shapes)
        results, split, whole = structure.unflatten(flat)
        differ = structure.unflatten(differing(program.jaxpr, self._differ))
        whole = self._agreed(whole, differ[2])
        return [x[None] for x in results], [x[None] for x in split], whole

    def _replica(
        self, leaves: list[Any], values: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        region = Region(
            self._strategy,
            self._layout,
            self._trace,
            {
                id(variable): value[0] if is_split(variable) else value
                for variable, value in zip(self._known, values, strict=True)
            },
        )
        own = iter(leaves)

        def argument(leaf: Any) -> Any:
            if not isinstance(leaf, _Argument):
                return leaf
            return next(own)[0] if leaf.stacked else next(own)

        args, kwargs = map_nest(argument, self._arguments)
        results: list[Any] = []

        def keep(leaf: Any) -> Any:
            if isinstance(leaf, keras.Variable):
                leaf = leaf.value
            if not isinstance(leaf, (jax.Array, np.ndarray, int, float)):
                return leaf
            results.append(jnp.asarray(leaf))
            return _RESULT

        replica = TracedReplica(region)
        with (
            region.current(),
            TracedCall(
                replica, TracedRunner(region), self._strategy, region
            ) as call,
        ):
            self.result = map_nest(keep, self._fn(*args, **kwargs))
            replica.meet(
                "the end of the replica function",
                lambda everyone: call.commit(everyone, []),
                call.writes,
            )
        written = list(region.written.values())
        split = [v for v in written if is_split(v)]
        whole = [v for v in written if not is_split(v)]
        self.written = [*split, *whole]
        return (
            results,
            [_as_kept(v, region.values[id(v)]) for v in split],
            [_as_kept(v, region.values[id(v)]) for v in whole],
        )

    def _agreed(self, values: list[Any], differ: list[bool]) -> list[Any]:
        """The values that all replicas go on with, of those they left."""
        variables = self.written[len(self.written) - len(values) :]
        for variable, differs in zip(variables, differ, strict=True):
            if not differs:
                continue
            dtype = keras.backend.standardize_dtype(variable.dtype)
            if variable.trainable or "float" not in dtype:
                raise ReplicaDivergenceError(
                    f"Replicas may leave different values in variable "
                    f"'{variable.path}', whose aggregation is "
                    f"'{variable.aggregation}': they depend on what each "
                    "replica has of its own. Expected: the same value on each "
                    "replica. Make the variable with `aggregation='mean'`, "
                    "'sum' or 'only_first_replica', or with "
                    "`synchronization='on_read'` for a value of each "
                    "replica's own."
                )
        own = [v for v, differs in zip(values, differ, strict=True) if differs]
        means = iter(lax.pmean(own, AXIS) if own else [])
        return [
            next(means) if differs else value
            for value, differs in zip(values, differ, strict=True)
        ]


def _as_kept(variable: keras.Variable, value: Any) -> Any:
    """A value in the variable's dtype, or each call would be traced anew."""
    return lax.convert_element_type(value, variable.dtype)
