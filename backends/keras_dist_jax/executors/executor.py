"""The executor of a plan, by one program over its devices."""

import contextlib
import weakref
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import keras
from keras import ops

from keras_dist.errors import UnsupportedModelError
from keras_dist.plugins import Device
from keras_dist.plugins import Executor
from keras_dist.plugins import Owners
from keras_dist.plugins import OwnRows
from keras_dist.plugins import PerReplica
from keras_dist.plugins import Plan
from keras_dist.plugins import ReduceOp
from keras_dist.plugins import ReplicaRunner
from keras_dist.plugins import Storage
from keras_dist.plugins import combine
from keras_dist.plugins import widened
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.central.steps import CentralTrainer
from keras_dist_jax.central.storage import CentralRunning
from keras_dist_jax.central.storage import StorageLayouts
from keras_dist_jax.cluster.workers import JaxWorkers
from keras_dist_jax.executors.replicas import JaxReplicas
from keras_dist_jax.fit.running import Running
from keras_dist_jax.fit.trainer import Trainer
from keras_dist_jax.functions.compiler import JaxCompiler
from keras_dist_jax.functions.tracing import current_trace
from keras_dist_jax.machine import described
from keras_dist_jax.machine import jit
from keras_dist_jax.placement import batches
from keras_dist_jax.placement.arrays import copy_of
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.placement.layout import MeshLayout
from keras_dist_jax.placement.layout import default_device
from keras_dist_jax.placement.layout import jax_devices
from keras_dist_jax.placement.layout import mark_even
from keras_dist_jax.placement.per_replica import JoinedPerReplica
from keras_dist_jax.throttle import Throttle
from keras_dist_jax.variables.storage import CentralStorage
from keras_dist_jax.variables.storage import JaxStorage
from keras_dist_jax.variables.storage import own_shard_on


class JaxExecutor(Executor):
    """The executor of Keras' own trainer and steps on a layout."""

    sees_all_rows = True
    # Where the single copies of variables are; `None` without any.
    storage_layouts: StorageLayouts | None = None

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        throttle: Throttle,
        workers: JaxWorkers | None = None,
    ) -> None:
        super().__init__(plan, workers)
        self.layout = layout
        self.throttle = throttle
        self._devices = jax_devices()
        # The place of results that belong to no variable: with central
        # storage they can be combined with all variables there.
        self._storage_layout = self.storage_layouts or layout
        self._replicas: JaxReplicas | None = (
            JaxReplicas(
                layout, plan.first_replica, workers, self._storage_layout
            )
            if layout.is_mesh
            else None
        )
        self.compiler = JaxCompiler(
            layout, throttle if layout.is_mesh else Throttle()
        )
        # Reductions of stacked values, each by one collective in one program.
        self._totals = {
            ReduceOp.SUM: jit(_sum, _as_batch, out_shardings=layout.replicated),
            ReduceOp.MEAN: jit(
                _mean, _as_batch, out_shardings=layout.replicated
            ),
        }
        self._running: weakref.WeakKeyDictionary[keras.Model, Running] = (
            weakref.WeakKeyDictionary()
        )

    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        return default_device(self._storage_layout.devices[0])

    def execution_scope(self) -> contextlib.AbstractContextManager[Any]:
        return self.layout.scope()

    def default_device(self) -> Any:
        return jax.config.jax_default_device

    def storage(self, variable: keras.Variable) -> Storage:
        return JaxStorage(variable, self.plan, self.layout)

    @property
    def replicas(self) -> ReplicaRunner | None:
        return self._replicas

    @property
    def num_components(self) -> int:
        if current_trace() is None:
            return self.plan.num_local_replicas
        return self.layout.num_replicas

    def put(self, value: Any, device: Device) -> Any:
        target = self._devices[device]
        if isinstance(value, jax.Array) and not isinstance(
            value, jax.core.Tracer
        ):
            return own_shard_on(value, target)
        with default_device(target):
            tensor = ops.convert_to_tensor(value)
        if isinstance(tensor, jax.core.Tracer):
            return tensor
        return jax.device_put(tensor, target)

    def mark_even(self, value: Any) -> None:
        if self.layout.is_global:
            mark_even(value)

    def per_replica(self, values: Sequence[Any]) -> PerReplica:
        trace = current_trace()
        if trace is not None and trace.of_replica is not None:
            of_trace: PerReplica = trace.of_replica.per_replica(values)
            return of_trace
        if all(isinstance(value, jax.Array) for value in values):
            return JoinedPerReplica(None, False, self.layout, values)
        return PerReplica(values)

    def check_arguments(self, nest: Any) -> None:
        if current_trace() is not None:
            return
        for leaf in jax.tree.leaves(nest):
            if isinstance(leaf, jax.core.Tracer):
                raise UnsupportedModelError(
                    "`strategy.run` can't be traced by `jax.jit`, `jax.grad` "
                    "or similar functions: it calls a function once for each "
                    "replica, on the replica's own device.\nReceived: "
                    f"{leaf!r} as an argument. Expected: arrays. Use the "
                    "transformation inside of the replica function."
                )

    def bring(self, value: Any, index: int) -> Any:
        # JAX moves an uncommitted array to the device that needs it.
        if isinstance(value, jax.core.Tracer):
            return value
        if isinstance(value, jax.Array) and value.committed:
            return own_shard_on(value, self.layout.devices[index])
        return value

    def device_of(self, tensor: Any) -> Device:
        if isinstance(tensor, jax.core.Tracer) or not isinstance(
            tensor, jax.Array
        ):
            return self.plan.primary
        holders = tensor.sharding.device_set
        return next(d for d, known in self._devices.items() if known in holders)

    def mirror(self, value: Any) -> Any:
        # Without a copy, the first device would share the value's buffer.
        array = self.put(value, self.plan.primary)
        if isinstance(array, jax.core.Tracer):
            return array
        array = copy_of(array)
        return self._storage_layout.place(array)

    def combine_all(
        self, op: ReduceOp, values: Sequence[Sequence[Any]]
    ) -> list[Any]:
        trace = current_trace()
        if trace is None:
            return super().combine_all(op, values)
        return [
            self._combine_traced(op, components, trace) for components in values
        ]

    def _combine_traced(
        self, op: ReduceOp, values: Sequence[Any], trace: Any
    ) -> Any:
        if trace.of_replica is not None:
            combined = trace.of_replica.combine(op, values)
            if combined is not None:
                return combined
        if self.workers is not None:  # the values are of all replicas
            return combine(op, list(values))
        return super().combine_all(op, [values])[0]

    def concatenate(self, values: Sequence[Any], axis: int) -> Any:
        if current_trace() is not None and self.workers is not None:
            return ops.concatenate(list(values), axis=axis)
        return super().concatenate(values, axis)

    def combine_whole(self, op: ReduceOp, value: Any) -> Any:
        total = self._totals.get(op)
        if (
            total is None
            or not isinstance(value, JoinedPerReplica)
            or value.joined is None
            or not value.stacked
            or value.layout is not self.layout
        ):
            return None
        if current_trace() is not None:
            return total(value.joined)
        if self.workers is not None:
            size = value.joined.nbytes // self.layout.num_replicas
            if self.workers.is_small(size):
                return None  # the components travel in a frame
            layout = f"{value.joined.dtype}{list(value.joined.shape[1:])}"
            self.workers.barrier(f"a reduction by {op.name}", layout)
        result = self.throttle.run(total, value.joined)
        return self._resting(self.layout.to_local(result))

    def _resting(self, array: Any) -> Any:
        """Puts a result on the devices where variables rest."""
        return array

    def bind(self, model: keras.Model) -> Mapping[str, Callable[..., Any]]:
        internals.forget_functions(model)
        trainer = self._trainer_of(model)
        self._running[model] = trainer.running
        return trainer.replacements()

    def _trainer_of(self, model: keras.Model) -> Trainer:
        return Trainer(Running(model, self.layout, self.throttle))

    def trace_step(self, model: keras.Model, batch: Any) -> None:
        """Notes the programs of a step of `fit`, for a described batch."""
        self._trainer_of(model).trace_step(jax.tree.map(described, batch))

    def rows_in_fit(self, batch: Any) -> list[range]:
        return batches.shares(batch, self.plan.num_replicas)

    def own_rows_of(self, model: keras.Model) -> type[OwnRows] | None:
        # Operation by operation, each device computes all rows.
        return OwnRows if internals.compiles(model) else None

    def read_from(self, iterator: Any, adapter: Any) -> None:
        super().read_from(iterator, adapter)
        internals.read_on_host(iterator)

    def recover(self, model: keras.Model) -> None:
        self._running[model].recover()

    def release(self, model: keras.Model) -> None:
        self._running[model].release()


class JaxCentralExecutor(JaxExecutor):
    """The executor of a plan with a single copy of each variable."""

    storage_layouts: StorageLayouts
    layout: MeshLayout

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        throttle: Throttle,
        workers: JaxWorkers | None = None,
    ) -> None:
        known = jax_devices()
        self._owners = Owners(plan.variable_devices)
        self.storage_layouts = StorageLayouts(
            self._owners, {d: known[d] for d in plan.variable_devices}
        )
        super().__init__(plan, layout, throttle, workers)

    def storage(self, variable: keras.Variable) -> CentralStorage:
        parameter_device, layout = (
            self._owners.of(variable),
            self.storage_layouts.of(variable),
        )
        return CentralStorage(
            variable, parameter_device, layout, self.layout.devices
        )

    def keep_together(
        self, variable: keras.Variable, reference: keras.Variable
    ) -> None:
        self._owners.keep_together(variable, reference)

    def _resting(self, array: Any) -> Any:
        return self.storage_layouts.place(array)

    def _trainer_of(self, model: keras.Model) -> Trainer:
        return CentralTrainer(
            CentralRunning(
                model, self.layout, self.throttle, self.storage_layouts
            )
        )


def _as_batch(stacked: Any) -> dict[str, Any]:
    return {"batch": stacked}


def _sum(stacked: Any) -> Any:
    stacked = widened(ReduceOp.SUM, stacked)
    return jax.numpy.sum(stacked, axis=0, dtype=stacked.dtype)


def _mean(stacked: Any) -> Any:
    return ops.mean(stacked, axis=0)
