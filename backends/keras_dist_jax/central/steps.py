"""Training steps that compute on other devices than keep the variables."""

import itertools
import warnings
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Container
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from keras_dist_jax import keras_internals as internals
from keras_dist_jax.central.postponed import Pending
from keras_dist_jax.central.postponed import Postponed
from keras_dist_jax.central.postponed import Update
from keras_dist_jax.central.storage import CentralRunning
from keras_dist_jax.central.storage import Merge
from keras_dist_jax.central.storage import bring
from keras_dist_jax.central.storage import send
from keras_dist_jax.fit.running import FitStep
from keras_dist_jax.fit.running import Values
from keras_dist_jax.fit.running import groups_like
from keras_dist_jax.fit.running import like
from keras_dist_jax.fit.trainer import Trainer
from keras_dist_jax.jax_internals import opened
from keras_dist_jax.machine import COPIES
from keras_dist_jax.machine import GRADIENTS
from keras_dist_jax.machine import jit
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.placement.layout import Programs
from keras_dist_jax.placement.layout import StepFn
from keras_dist_jax.programs import jaxprs
from keras_dist_jax.throttle import any_of


class Part:
    """A compiled part of a step, which takes values of the state and others.

    Args:
        fn: Function of values of the state, by position, and of others, that
            returns the outputs, new values, and values for other parts.
        reads: Sequence of the positions that it takes.
        new: Sequence of the positions whose new values it gives.
        expendable: Positions whose values it may delete.
        name: String, the program's name.
        groups: Names of what it takes: of the state, and the others.
        **shardings: Of `jax.jit`.
    """

    def __init__(
        self,
        fn: Callable[[Mapping[int, Any], Sequence[Any]], Any],
        reads: Sequence[int],
        new: Collection[int],
        expendable: Container[int],
        name: str,
        groups: tuple[str, str],
        **shardings: Any,
    ) -> None:
        self.new = list(new)
        replaced = {p for p in new if p in expendable}
        self.donated = [p for p in reads if p in replaced]
        self.read = [p for p in reads if p not in replaced]
        order = [*self.donated, *self.read]

        def run(donated: Any, read: Any, others: Any) -> Any:
            given = dict(zip(order, [*donated, *read], strict=True))
            return fn(given, others)

        def named(
            donated: object, read: object, others: object
        ) -> dict[str, Any]:
            return dict(zip(groups, ([donated, read], others), strict=True))

        run.__name__ = run.__qualname__ = name
        self.keep = jit(run, named, **shardings)
        self.donate = jit(run, named, donate_argnums=0, **shardings)


class UpdatePart(Part):
    """An update of variables after the gradients, on one device."""

    def __init__(
        self,
        update: Update,
        positions: Collection[int],
        owners: Sequence[Any],
        primary: object,
    ) -> None:
        needed = update.needed(positions)
        state = {i: p for i, p in update.state.items() if i in needed}
        crossing = {i: p for i, p in update.crossing.items() if i in needed}

        def run(values: Mapping[int, Any], handed: Sequence[Any]) -> Any:
            given = {i: values[p] for i, p in state.items()}
            given.update(zip(crossing, handed, strict=True))
            return [], update.run(given, positions), []

        reads = [*dict.fromkeys(state.values())]
        name, groups = "optimizer_update", ("variables", GRADIENTS)
        everything = range(len(owners))
        super().__init__(run, reads, positions, everything, name, groups)
        # Positions of its inputs among the values that the first part hands on.
        # `visitors` are positions in the state of inputs on other devices.
        self.crossing = [*crossing.values()]
        storage_layouts = {owners[p] for p in positions}
        self.device = (
            storage_layouts.pop() if len(storage_layouts) == 1 else primary
        )
        self.visitors = [p for p in reads if owners[p] != self.device]
        self.is_elsewhere = bool(
            storage_layouts
        )  # it replaces values of several devices


class StepParts:
    """The programs of a training step for one kind of batch."""

    def __init__(
        self,
        mesh: Layout,
        first: Part,
        updates: Sequence[UpdatePart],
        values: Sequence[Sequence[Any]],
        owners: Sequence[Any],
    ) -> None:
        self._mesh = mesh
        self._first = first
        self._updates = updates
        places = [(g, i) for g, v in enumerate(values) for i in range(len(v))]
        self._places = places
        self._results = [[places[p] for p in update.new] for update in updates]
        # Values that an update leaves on another device go back to their own.
        is_moved = any(update.is_elsewhere for update in updates)
        self._owners = owners if is_moved else None
        self._targets = [owners[p] for p in first.new]
        for update in updates:
            count = len(update.crossing) + len(update.visitors)
            self._targets += [update.device] * count

    def first(self, state: Sequence[Any], batch: Sequence[Any]) -> Any:
        """Runs the step up to the gradients, on the devices that compute."""
        first = self._first
        positions = [*first.donated, *first.read]
        sent = send([state[p] for p in positions], self._mesh)
        count = len(first.donated)
        return first.donate(sent[:count], sent[count:], batch)

    def updates(
        self, state: Values, first: Any, donates: bool
    ) -> tuple[list[Any], Merge]:
        """Returns the updates to run, and the state that they make."""
        _, new, crossing = first
        flat = list(itertools.chain(*state))
        moving = list(new)
        for update in self._updates:
            moving += [crossing[p] for p in update.crossing]
            moving += [flat[p] for p in update.visitors]
        moved = iter(bring(moving, self._targets))
        values = [list(group) for group in state]
        for position in self._first.new:
            group, index = self._places[position]
            values[group][index] = next(moved)
        calls = []
        for update in self._updates:
            taken = [next(moved) for _ in update.crossing]
            here = {p: next(moved) for p in update.visitors}
            donated = [here.get(p, flat[p]) for p in update.donated]
            read = [here.get(p, flat[p]) for p in update.read]
            run = update.donate if donates else update.keep
            calls.append(map(run, (donated,), (read,), (taken,)))
        return calls, Merge(values, self._results, self._owners)


# The index of the optimizer's variables among the groups of a state.
_OPTIMIZER = internals.STATE_GROUPS.index("optimizer_variables")


class CentralTrainer(Trainer):
    """Keras' trainer, for a model whose variables have one copy."""

    running: CentralRunning

    def _step(self, name: str, gather: bool = False) -> FitStep:
        if name == "train_step":
            self.running.postpones = internals.compiles(self.running.model)
            if self.running.postpones:
                return CentralStep(self.running, self._stateless(name))
        return super()._step(name, gather)


class CentralStep(FitStep):
    """A training step that leaves its updates to the devices of variables.

    If it computes with what an update gives, the devices that compute run all
    of it.
    """

    _running: CentralRunning

    def __init__(self, running: CentralRunning, step: StepFn) -> None:
        uncompiled = Programs(step, step)
        super().__init__(running, "train_step", uncompiled, uncompiled)
        self._fn = step
        self._postponed = Postponed()
        self._is_whole = False
        self._programs: dict[Any, StepParts] = {}
        self._updates: dict[Any, UpdatePart] = {}
        self._token: Any = None
        self._kinds: Any = None
        self._has_warned = False

    def _run(self, data: object, donating: bool) -> Any:
        running, throttle, mesh = (
            self._running,
            self._throttle,
            self._running.layout,
        )
        is_sharded, data, rows = mesh.put_batch(data)
        sharding = mesh.sharded if is_sharded else mesh.replicated
        with throttle.lock:
            throttle.drain(running)
            if running.failures:
                running.raise_failure()
            values = running.newest()
            state = list(itertools.chain(*values))
            program = self._program(values, sharding, data, rows)
            kept: list[Any] = []
            leaves = jax.tree.leaves(data)
            throttle.dispatch(
                running, kept, any_of, program.first, state, leaves
            )
            first = kept[0]
            calls, merge = program.updates(values, first, donating)
            # `extend` runs in C, so that no interrupt comes after an update has
            # deleted its inputs and before its results are kept.
            running.last.extend(zip(*calls, [merge], strict=True))
            running.newest()
            return jax.tree.map(mesh.result, first[0])

    def _program(
        self,
        values: Sequence[Sequence[Any]],
        sharding: object,
        data: object,
        rows: int | None,
    ) -> StepParts:
        if self._token is not self._running.token:
            self._token = self._running.token
            self._kinds = tuple(tuple(map(_kind_of, group)) for group in values)
        leaves, structure = jax.tree.flatten(data)
        kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = self._kinds, sharding, rows, structure, kinds
        if key not in self._programs:
            shapes = [list(map(_shape_of, group)) for group in values]
            self._programs[key] = self._compiled(shapes, sharding, data, rows)
        return self._programs[key]

    def _compiled(
        self, values: Any, sharding: Any, data: Any, rows: int | None
    ) -> StepParts:
        running, mesh = self._running, self._running.layout
        data = jax.tree.map(_shape_of, data)
        program, given, updates = self._split(values, data, rows)
        owners = running.devices_of_state()
        primary = running.storage_layouts.primary.devices[0]
        flat = list(itertools.chain(*values))
        jaxpr = opened(program)
        used = jaxprs.taken(jaxpr.eqns) | {*jaxprs.variables(jaxpr.outvars)}
        reads = [p for p in range(len(flat)) if jaxpr.invars[p] in used]
        self._check(reads, values)
        call = jaxpr_as_fun(program)

        def compute(state: Mapping[int, Any], batch: Sequence[Any]) -> Any:
            taken = [
                state[p] if p in state else jnp.zeros(v.shape, v.dtype)
                for p, v in enumerate(flat)
            ]
            outputs, new, crossing = given.unflatten(call(*taken, *batch))
            return outputs, [*new.values()], crossing

        everything = given.unflatten(jaxpr.outvars)
        first = Part(
            compute,
            reads,
            [*everything[1]],
            # A new value can take the memory of the copy that was sent, unless
            # the variable rests on a device that computes, without a copy.
            {p for p, o in enumerate(owners) if o not in mesh.devices},
            self._fn.__name__,
            (COPIES, "batch"),
            in_shardings=(mesh.replicated, mesh.replicated, sharding),
            out_shardings=(
                mesh.replicated if mesh.is_global else None,
                mesh.replicated,
                mesh.replicated,
            ),
        )
        parts = []
        for update in updates:
            for positions in _by_owner(update, owners, flat):
                # Several kinds of batch may share an update.
                key = (
                    id(update.program),
                    *map(tuple, (update.state.items(), positions)),
                    tuple(update.crossing.items()),
                    *map(id, update.constants()),
                )
                if key not in self._updates:
                    part = UpdatePart(update, positions, owners, primary)
                    self._updates[key] = part
                parts.append(self._updates[key])
        return StepParts(mesh, first, parts, values, owners)

    def _split(
        self, values: object, data: object, rows: int | None
    ) -> tuple[Any, Any, list[Update]]:
        """Traces the step, without its updates if it can do without them.

        Returns the program, the structure of what it gives, and the updates.
        """
        postponed = self._postponed
        optimizers = internals.optimizers_of(self._running.model)
        if not self._is_whole:
            postponed.updates = []
            try:
                with postponed.replacing(optimizers):
                    return *self._traced(values, data, rows), postponed.updates
            except Exception:
                # What came of a placeholder may be any error.
                if not postponed.updates:
                    raise
        postponed.updates = []
        traced = self._traced(values, data, rows)
        self._is_whole = True
        return *traced, []

    def _traced(self, values: Any, data: Any, rows: int | None) -> Any:
        mesh = self._running.layout

        def step(state: Any, data: Any) -> Any:
            outputs, new = self._fn(tuple(map(list, state)), data)
            flat = list(itertools.chain(*state))
            changed: dict[int, Any] = {}
            crossing: list[Any] = []
            pairs = zip(
                itertools.chain(*groups_like(new, state)), flat, strict=True
            )
            for position, (value, before) in enumerate(pairs):
                if isinstance(value, Pending) and value.shape == before.shape:
                    value.update.results[position] = value.index
                elif value is not before:
                    changed[position] = like(value, before)
            for update in self._postponed.updates:
                update.find(flat, crossing)
            return outputs, changed, crossing

        edited = self._running.for_mesh(step)
        if rows is not None:
            edited = mesh.uneven(edited)
        program, shapes = jax.make_jaxpr(
            lambda state, data: edited(state, mesh.unpad(data, rows)),
            return_shape=True,
        )(values, data)
        return program, jax.tree.structure(shapes)

    def _check(self, reads: Sequence[int], values: Any) -> None:
        """Warns once if an optimizer's variables have to be sent."""
        start = sum(map(len, values[:_OPTIMIZER]))
        stop = start + len(values[_OPTIMIZER])
        flat = list(itertools.chain(*values))
        sent = [p for p in reads if start <= p < stop and flat[p].size > 1]
        if not sent or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"`train_step` of model '{self._running.model.name}' reads "
            f"{len(sent)} of its optimizer's variables, or computes with "
            "weights that it has updated. In each step, these variables are "
            "sent to the devices that compute, which takes time, and memory "
            "on those devices. To avoid this, call `optimizer.apply` once, "
            "after the last use of the weights, and outside of `jax.jit`, "
            "`jax.lax.cond` and similar functions.",
            stacklevel=2,
        )


def _by_owner(
    update: Update, owners: Sequence[Any], flat: Sequence[Any]
) -> Iterator[tuple[int, ...]]:
    """Yields the variables that an update is for, by device if that is exact.

    It is exact if what is for one device takes only single numbers from
    another, such as the count of steps.
    """
    groups: dict[Any, tuple[int, ...]] = {}
    for position in update.results:
        owner = owners[position]
        groups[owner] = *groups.get(owner, ()), position
    is_exact = all(
        owners[update.state[i]] == owner or flat[update.state[i]].size <= 1
        for owner, positions in groups.items()
        for i in update.needed(positions)
        if i in update.state
    )
    # What calls back runs once.
    is_exact = is_exact and not jaxprs.has_callbacks(update.program)
    yield from groups.values() if is_exact else [tuple(update.results)]


def _kind_of(array: jax.Array) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.weak_type


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    weak = getattr(array, "weak_type", False)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=weak)
