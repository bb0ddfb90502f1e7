"""Training steps that compute on other devices than keep the variables."""

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from keras_dist_jax import keras_internals as internals
from keras_dist_jax.callbacks import guarded
from keras_dist_jax.central import CentralRunning
from keras_dist_jax.central import Merge
from keras_dist_jax.central import bring
from keras_dist_jax.central import send
from keras_dist_jax.gate import any_of
from keras_dist_jax.layout import MeshLayout
from keras_dist_jax.layout import Programs
from keras_dist_jax.layout import StepFn
from keras_dist_jax.optimizer_calls import OptimizerCalls
from keras_dist_jax.optimizer_calls import is_update
from keras_dist_jax.partition import Partition
from keras_dist_jax.partition import Update
from keras_dist_jax.running import FitStep
from keras_dist_jax.running import Values
from keras_dist_jax.running import all_values
from keras_dist_jax.trainer import Trainer


class FirstPart:
    """A step up to the gradients, on the devices that compute.

    `owners` are the `jax.Device`s that keep each value of the state, `sharding`
    is the batch's, and profiles show `name`.

    Attributes:
        outputs: Positions of the step's outputs that it gives.
        new: Positions in the state that it gives new values of.
        kept: Positions in the state that nothing changes.
    """

    def __init__(
        self,
        partition: Partition,
        mesh: MeshLayout,
        owners: Sequence[Any],
        sharding: Any,
        name: str,
    ) -> None:
        count = partition.num_outputs
        self.outputs = [p for p in partition.gives if p < count]
        self.new = [p - count for p in partition.gives if p >= count]
        self.kept = partition.kept
        self._mesh = mesh
        # A new value can take the memory of the copy that was sent, unless the
        # variable rests on a device that computes: there is no copy then.
        away = {p for p in self.new if owners[p] not in mesh.devices}
        self._donated = [p for p in partition.reads if p in away]
        self._others = [p for p in partition.reads if p not in away]
        order = [*self._donated, *self._others]
        places = [order.index(p) for p in partition.reads]
        call = core.jaxpr_as_fun(partition.first)

        def run(donated: Any, others: Any, batch: Any) -> Any:
            given = [*donated, *others]
            results = iter(call(*(given[p] for p in places), *batch))
            outputs = list(itertools.islice(results, len(self.outputs)))
            new = list(itertools.islice(results, len(self.new)))
            return outputs, new, list(results)

        run.__name__ = run.__qualname__ = name
        self._run = jax.jit(
            run,
            donate_argnums=0,
            in_shardings=(mesh.whole, mesh.whole, sharding),
            out_shardings=(
                mesh.whole if mesh.is_wide else None,
                mesh.whole,
                mesh.whole,
            ),
        )

    def __call__(
        self, state: Sequence[Any], batch: Sequence[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the outputs, the new values and the updates' inputs."""
        positions = [*self._donated, *self._others]
        sent = send([state[p] for p in positions], self._mesh)
        count = len(self._donated)
        result: tuple[list[Any], list[Any], list[Any]] = self._run(
            sent[:count], sent[count:], batch
        )
        return result


class UpdatePart:
    """An update after the gradients, on one device that keeps variables.

    `owners` are the `jax.Device`s that keep each value of the state, `primary`
    is the first one that keeps variables, and `num_outputs` the number of the
    step's outputs.

    Attributes:
        device: The `jax.Device` that it runs on.
        crossing: Positions of its inputs among the values that the first part
            hands over.
        outputs: Positions of the step's outputs that it gives.
        new: Positions in the state that it gives new values of.
        visitors: Positions in the state of its inputs from other devices.
    """

    def __init__(
        self,
        update: Update,
        owners: Sequence[Any],
        primary: Any,
        num_outputs: int,
    ) -> None:
        self.crossing = update.crossing
        self.outputs = [p for p in update.results if p < num_outputs]
        self.new = [p - num_outputs for p in update.results if p >= num_outputs]
        homes = {owners[p] for p in self.new}
        self.device = homes.pop() if len(homes) == 1 else primary
        self.visitors = [p for p in update.state if owners[p] != self.device]
        self.is_elsewhere = bool(homes)
        replaced = set(self.new)
        self.donated = [p for p in update.state if p in replaced]
        self.read = [p for p in update.state if p not in replaced]
        order = [*self.donated, *self.read]
        places = [order.index(p) for p in update.state]
        call, count = core.jaxpr_as_fun(update.program), len(self.outputs)

        def optimizer_update(donated: Any, read: Any, crossing: Any) -> Any:
            given = [*donated, *read]
            results = call(*(given[p] for p in places), *crossing)
            return results[:count], results[count:]

        self._keep = jax.jit(optimizer_update)
        self._donate = jax.jit(optimizer_update, donate_argnums=0)

    def program(self, donates: bool) -> Any:
        """Returns the compiled update.

        Its arguments are the values that it replaces, which it deletes if it
        `donates`, those that it only reads, and those of the first part.
        """
        return self._donate if donates else self._keep


class StepParts:
    """The programs of a training step for one kind of batch.

    `values` is the state in groups, as shapes; `owners` are the `jax.Device`s
    that keep each value, and `structure` is that of the step's outputs.
    """

    def __init__(
        self,
        first: FirstPart,
        updates: Sequence[UpdatePart],
        values: Sequence[Sequence[Any]],
        owners: Sequence[Any],
        structure: Any,
    ) -> None:
        self.first = first
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

    def updates(
        self, state: Values, first: Any, donates: bool
    ) -> tuple[list[Any], Merge]:
        """Returns the updates to run, and the state that they make.

        `state` is the one before the step, in groups, and `first` the result of
        the first part; updates that donate delete the values that they replace.
        """
        _, new, crossing = first
        flat = list(itertools.chain(*state))
        moving = list(new)
        for update in self._updates:
            moving += [crossing[p] for p in update.crossing]
            moving += [flat[p] for p in update.visitors]
        moved = iter(bring(moving, self._targets))
        values = [list(group) for group in state]
        for position in self.first.new:
            group, index = self._places[position]
            values[group][index] = next(moved)
        calls = []
        for update in self._updates:
            taken = [next(moved) for _ in update.crossing]
            here = {p: next(moved) for p in update.visitors}
            donated = [here.get(p, flat[p]) for p in update.donated]
            read = [here.get(p, flat[p]) for p in update.read]
            run = update.program(donates)
            calls.append(map(run, (donated,), (read,), (taken,)))
        return calls, Merge(values, self._results, self._owners)

    def outputs(self, first: Any, results: Sequence[Any]) -> Any:
        """Returns the step's outputs, from the results of its programs."""
        found = dict(zip(self.first.outputs, first[0], strict=True))
        for update, (outputs, _) in zip(self._updates, results, strict=True):
            found.update(zip(update.outputs, outputs, strict=True))
        leaves = [found[place] for place in range(len(found))]
        return jax.tree.unflatten(self._structure, leaves)


# The index of the optimizer's variables among the groups of a state.
_OPTIMIZER = internals.STATE_GROUPS.index("optimizer_variables")


class CentralTrainer(Trainer):
    """Keras' trainer, for a model whose variables have one copy."""

    def __init__(self, running: CentralRunning) -> None:
        super().__init__(running)
        self._central = running

    def _step(
        self, fn: StepFn, trains: bool = False, gather: bool = False
    ) -> FitStep:
        if trains and internals.compiles(self._central.model):
            return CentralStep(self._central, fn)
        return super()._step(fn, trains, gather)


class CentralStep(FitStep):
    """A training step that is split between two kinds of devices.

    A step is traced once for each kind of batch, and split in two
    (`partition`): the gradients are computed on the devices that compute, the
    optimizer runs where its variables are. With several devices that keep
    variables, each runs its part of the update, if that is exact: if its part
    needs nothing of the others' but gradients and single numbers. Otherwise,
    as with gradient accumulation or loss scaling of some optimizers, the
    whole state is brought to the first of them for the update.
    """

    def __init__(self, running: CentralRunning, step: StepFn) -> None:
        uncompiled = Programs(step, step)
        super().__init__(running, uncompiled, uncompiled)
        self._central = running
        self._fn = step
        self._calls = OptimizerCalls()
        self._programs: dict[Any, StepParts] = {}
        self._updates: dict[Any, UpdatePart] = {}
        self._token: Any = None
        self._kinds: Any = None
        self._has_warned = False

    def _run(self, data: Any, donating: bool) -> Any:
        running, gate = self._central, self._gate
        mesh = running.mesh
        is_cut, data, rows = mesh.put_batch(data)
        sharding = mesh.cut if is_cut else mesh.whole
        with gate.lock:
            gate.settle(running)
            if running.failures.errors:
                running.raise_failure()
            values = running.newest()
            state = list(itertools.chain(*values))
            program = self._program(values, state, sharding, data, rows)
            first = program.first(state, jax.tree.leaves(data))
            gate.enter(running, any_of(first))
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
        state: Sequence[Any],
        sharding: Any,
        data: Any,
        rows: int | None,
    ) -> StepParts:
        running = self._central
        if self._token is not running.token:
            self._token = running.token
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
        running = self._central
        mesh = running.mesh
        step = guarded(all_values(self._fn), running.failures)

        def on_rows(state: Any, data: Any) -> Any:
            return step(state, mesh.unpad(data, rows))

        data = jax.tree.map(_shape_of, data)
        with self._calls.marked(internals.optimizers_of(running.model)):
            closed, shapes = jax.make_jaxpr(on_rows, return_shape=True)(
                values, data
            )
        partition = Partition(closed, sum(map(len, values)), is_update)
        owners = running.devices_of_state()
        primary = running.homes.primary.devices[0]
        self._check(partition, values)
        first = FirstPart(partition, mesh, owners, sharding, self._fn.__name__)
        updates = [
            self._update(each, owners, primary, partition.num_outputs)
            for each in partition.updates(owners, primary)
        ]
        structure = jax.tree.structure(shapes[0])
        return StepParts(first, updates, values, owners, structure)

    def _update(
        self,
        update: Update,
        owners: Sequence[Any],
        primary: Any,
        num_outputs: int,
    ) -> UpdatePart:
        """Returns an update's program; several kinds of batch may share it."""
        key = update.key, update.results
        if update.key is None or key not in self._updates:
            self._updates[key] = UpdatePart(
                update, owners, primary, num_outputs
            )
        return self._updates[key]

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
        model = self._central.model
        warnings.warn(
            f"`train_step` of model '{model.name}' reads {len(sent)} of its "
            "optimizer's variables, or computes with weights that it has "
            "updated. They are sent to the devices that compute in each step, "
            "which is slower and needs their memory there. To avoid it, call "
            "`optimizer.apply` once, as the last that weights are used for, "
            "and not inside of `jax.jit`, `jax.lax.cond` and the like.",
            stacklevel=2,
        )


def _kind_of(array: Any) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.weak_type


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    weak = getattr(array, "weak_type", False)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=weak)
