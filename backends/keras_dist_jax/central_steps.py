"""Training steps that compute on other devices than keep the variables."""

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from keras_dist_jax import batches
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.callbacks import guarded
from keras_dist_jax.central import CentralRunning
from keras_dist_jax.central_programs import FirstPart
from keras_dist_jax.central_programs import StepParts
from keras_dist_jax.central_programs import UpdatePart
from keras_dist_jax.layout import StepFn
from keras_dist_jax.optimizer_calls import OptimizerCalls
from keras_dist_jax.optimizer_calls import is_update
from keras_dist_jax.partition import Partition
from keras_dist_jax.partition import Update
from keras_dist_jax.steps import FitStep
from keras_dist_jax.steps import all_values
from keras_dist_jax.steps import any_of
from keras_dist_jax.trainer import Trainer

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
        mesh = running.mesh
        router = mesh.routed(mesh.cut, mesh.whole)
        super().__init__(running, router, router)
        self._central = running
        self._fn = step
        self._calls = OptimizerCalls()
        self._router = router
        self._programs: dict[Any, StepParts] = {}
        self._updates: dict[Any, UpdatePart] = {}
        self._token: Any = None
        self._kinds: Any = None
        self._has_warned = False

    def _run(self, data: Any, donating: bool) -> Any:
        running, gate = self._central, self._gate
        sharding, data, rows = self._router.route(data)
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
            return jax.tree.map(running.mesh.result, outputs)

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
            if rows is not None:
                data = batches.unpad(data, rows, mesh.cut)
            return step(state, data)

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
