"""Training steps that compute on other devices than keep the variables."""

import itertools
import warnings
from collections.abc import Container
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from keras_dist_jax import keras_internals as internals
from keras_dist_jax.central import CentralRunning
from keras_dist_jax.central import Merge
from keras_dist_jax.central import bring
from keras_dist_jax.central import send
from keras_dist_jax.gate import any_of
from keras_dist_jax.layout import Layout
from keras_dist_jax.layout import Programs
from keras_dist_jax.layout import StepFn
from keras_dist_jax.machine import COPIES
from keras_dist_jax.machine import GRADIENTS
from keras_dist_jax.machine import jit
from keras_dist_jax.optimizer_calls import OptimizerCalls
from keras_dist_jax.partition import Partition
from keras_dist_jax.partition import Update
from keras_dist_jax.running import FitStep
from keras_dist_jax.running import Values
from keras_dist_jax.running import all_values
from keras_dist_jax.trainer import Trainer


class Part:
    """A compiled part of a step, which takes values of the state and others."""

    def __init__(
        self,
        program: Any,
        reads: Sequence[int],
        results: Sequence[int],
        num_outputs: int,
        expendable: Container[int],
        name: str,
        groups: tuple[str, str],
        **shardings: Any,
    ) -> None:
        # Positions among the step's outputs of those that this part gives. Then
        # positions in the state: of values that it replaces, of values that it
        # may delete, and of other values that it takes. `groups` names those of
        # the state that it takes, and the others.
        self.outputs = [p for p in results if p < num_outputs]
        self.new = new = [p - num_outputs for p in results if p >= num_outputs]
        replaced = {p for p in new if p in expendable}
        self.donated = [p for p in reads if p in replaced]
        self.read = [p for p in reads if p not in replaced]
        order = [*self.donated, *self.read]
        places = [order.index(p) for p in reads]
        call, count = core.jaxpr_as_fun(program), len(self.outputs)

        def run(donated: Any, read: Any, others: Any) -> Any:
            given = [*donated, *read]
            found = call(*(given[p] for p in places), *others)
            outputs, found = found[:count], found[count:]
            return outputs, found[: len(new)], found[len(new) :]

        def named(donated: Any, read: Any, others: Any) -> dict[str, Any]:
            return dict(zip(groups, ([donated, read], others), strict=True))

        run.__name__ = run.__qualname__ = name
        self.keep = jit(run, named, **shardings)
        self.donate = jit(run, named, donate_argnums=0, **shardings)


class UpdatePart(Part):
    """An update after the gradients, on one device that keeps variables."""

    def __init__(
        self,
        update: Update,
        owners: Sequence[Any],
        primary: Any,
        num_outputs: int,
    ) -> None:
        super().__init__(
            update.program,
            update.state,
            update.results,
            num_outputs,
            range(len(owners)),
            "optimizer_update",
            ("variables", GRADIENTS),
        )
        # Positions of its inputs among the values that the first part hands on.
        # `visitors` are positions in the state of inputs on other devices.
        self.crossing = update.crossing
        homes = {owners[p] for p in self.new}
        self.device = homes.pop() if len(homes) == 1 else primary
        self.visitors = [p for p in update.state if owners[p] != self.device]
        self.is_elsewhere = bool(homes)  # it replaces values of several devices


class StepParts:
    """The programs of a training step for one kind of batch."""

    def __init__(
        self,
        mesh: Layout,
        first: Part,
        updates: Sequence[UpdatePart],
        values: Sequence[Sequence[Any]],
        owners: Sequence[Any],
        structure: Any,
    ) -> None:
        self._mesh = mesh
        self._first = first
        self._updates = updates
        self._structure = structure
        places = [(g, i) for g, v in enumerate(values) for i in range(len(v))]
        self._places = places
        self._results = [[places[p] for p in each.new] for each in updates]
        # Values that an update leaves on another device go back to their own.
        is_moved = any(each.is_elsewhere for each in updates)
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

    def outputs(self, first: Any, results: Sequence[Any]) -> Any:
        """Returns the step's outputs, from the results of its programs."""
        found = dict(zip(self._first.outputs, first[0], strict=True))
        for update, (outputs, *_) in zip(self._updates, results, strict=True):
            found.update(zip(update.outputs, outputs, strict=True))
        leaves = [found[place] for place in range(len(found))]
        return jax.tree.unflatten(self._structure, leaves)


# The index of the optimizer's variables among the groups of a state.
_OPTIMIZER = internals.STATE_GROUPS.index("optimizer_variables")


class CentralTrainer(Trainer):
    """Keras' trainer, for a model whose variables have one copy."""

    running: CentralRunning

    def _step(self, name: str, gather: bool = False) -> FitStep:
        if name == "train_step" and internals.compiles(self.running.model):
            return CentralStep(self.running, self._stateless(name))
        return super()._step(name, gather)


class CentralStep(FitStep):
    """A training step that is split between two kinds of devices.

    If its update can't be split exactly, the primary device runs all of it.
    """

    _running: CentralRunning

    def __init__(self, running: CentralRunning, step: StepFn) -> None:
        uncompiled = Programs(step, step)
        super().__init__(running, "train_step", uncompiled, uncompiled)
        self._fn = step
        self._calls = OptimizerCalls()
        self._programs: dict[Any, StepParts] = {}
        self._updates: dict[Any, UpdatePart] = {}
        self._token: Any = None
        self._kinds: Any = None
        self._has_warned = False

    def _run(self, data: Any, donating: bool) -> Any:
        running, gate, mesh = self._running, self._gate, self._running.layout
        is_cut, data, rows = mesh.put_batch(data)
        sharding = mesh.cut if is_cut else mesh.whole
        with gate.lock:
            gate.settle(running)
            if running.failures:
                running.raise_failure()
            values = running.newest()
            state = list(itertools.chain(*values))
            program = self._program(values, sharding, data, rows)
            kept: list[Any] = []
            leaves = jax.tree.leaves(data)
            gate.dispatch(running, kept, any_of, program.first, state, leaves)
            first = kept[0]
            calls, merge = program.updates(values, first, donating)
            # `extend` runs in C, so that no interrupt comes after an update has
            # deleted its inputs and before its results are kept.
            running.last.extend(zip(*calls, [merge], strict=True))
            running.newest()
            outputs = program.outputs(first, running.last[-1][:-1])
            return jax.tree.map(mesh.result, outputs)

    def _program(
        self,
        values: Sequence[Sequence[Any]],
        sharding: Any,
        data: Any,
        rows: int | None,
    ) -> StepParts:
        if self._token is not self._running.token:
            self._token = self._running.token
            self._kinds = tuple(tuple(map(_kind_of, each)) for each in values)
        leaves, structure = jax.tree.flatten(data)
        kinds = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = self._kinds, sharding, rows, structure, kinds
        if key not in self._programs:
            shapes = [list(map(_shape_of, each)) for each in values]
            self._programs[key] = self._compiled(shapes, sharding, data, rows)
        return self._programs[key]

    def _compiled(
        self, values: Any, sharding: Any, data: Any, rows: int | None
    ) -> StepParts:
        running, mesh = self._running, self._running.layout
        step = running.for_mesh(all_values(self._fn))

        def on_rows(state: Any, data: Any) -> Any:
            return step(state, mesh.unpad(data, rows))

        data = jax.tree.map(_shape_of, data)
        with self._calls.replacing(internals.optimizers_of(running.model)):
            closed, shapes = jax.make_jaxpr(on_rows, return_shape=True)(
                values, data
            )
        partition = Partition(closed, sum(map(len, values)))
        owners = running.devices_of_state()
        primary = running.homes.primary.devices[0]
        self._check(partition, values)
        # A new value can take the memory of the copy that was sent, unless the
        # variable rests on a device that computes: there is no copy then.
        away = {p for p, o in enumerate(owners) if o not in mesh.devices}
        first = Part(
            partition.first,
            partition.reads,
            partition.gives,
            partition.num_outputs,
            away,
            self._fn.__name__,
            (COPIES, "batch"),
            in_shardings=(mesh.whole, mesh.whole, sharding),
            out_shardings=(
                mesh.whole if mesh.is_wide else None,
                mesh.whole,
                mesh.whole,
            ),
        )
        updates = []
        for update in partition.updates(owners, primary):
            # Several kinds of batch may share an update.
            key = update.key, update.results
            if update.key is None or key not in self._updates:
                self._updates[key] = UpdatePart(
                    update, owners, primary, partition.num_outputs
                )
            updates.append(self._updates[key])
        structure = jax.tree.structure(shapes[0])
        return StepParts(mesh, first, updates, values, owners, structure)

    def _check(self, partition: Partition, values: Any) -> None:
        """Warns once if an optimizer's variables have to be sent."""
        start = sum(map(len, values[:_OPTIMIZER]))
        stop = start + len(values[_OPTIMIZER])
        flat = list(itertools.chain(*values))
        sent = [
            position
            for position in partition.reads
            if start <= position < stop and flat[position].size > 1
        ]
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


def _kind_of(array: Any) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.weak_type


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    weak = getattr(array, "weak_type", False)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=weak)
