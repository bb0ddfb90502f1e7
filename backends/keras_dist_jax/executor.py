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

from keras_dist.core.device import Device
from keras_dist.core.plan import Owners
from keras_dist.core.plan import Plan
from keras_dist.core.reduction import ReduceOp
from keras_dist.core.reduction import combine
from keras_dist.core.reduction import widened
from keras_dist.core.values import PerReplica
from keras_dist.errors import UnsupportedModelError
from keras_dist.plugin.executor import Executor
from keras_dist.plugin.home import Home
from keras_dist.plugin.runner import ReplicaRunner
from keras_dist_jax import batches
from keras_dist_jax import keras_internals as internals
from keras_dist_jax.arrays import copy_of
from keras_dist_jax.central import CentralRunning
from keras_dist_jax.central import Homes
from keras_dist_jax.central_steps import CentralTrainer
from keras_dist_jax.compiler import JaxCompiler
from keras_dist_jax.gate import Gate
from keras_dist_jax.joined import JoinedPerReplica
from keras_dist_jax.layout import Layout
from keras_dist_jax.layout import MeshLayout
from keras_dist_jax.layout import default_device
from keras_dist_jax.layout import jax_devices
from keras_dist_jax.layout import mark_even
from keras_dist_jax.machine import described
from keras_dist_jax.machine import jit
from keras_dist_jax.placement import CentralHome
from keras_dist_jax.placement import JaxHome
from keras_dist_jax.placement import own_shard_on
from keras_dist_jax.replicas import JaxReplicas
from keras_dist_jax.running import Running
from keras_dist_jax.tracing import current_trace
from keras_dist_jax.trainer import Trainer
from keras_dist_jax.workers import JaxWorkers


class JaxExecutor(Executor):
    """The executor of Keras' own trainer and steps on a layout."""

    # Where the single copies of variables are; `None` without any.
    homes: Homes | None = None

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        gate: Gate,
        workers: JaxWorkers | None = None,
    ) -> None:
        super().__init__(plan, workers)
        self.layout = layout
        self.gate = gate
        self._devices = jax_devices()
        # The place of results that belong to no variable: with central
        # storage they can be combined with all variables there.
        self._home = self.homes or layout
        self._replicas: JaxReplicas | None = (
            JaxReplicas(layout, plan.first_replica, workers, self._home)
            if layout.is_mesh
            else None
        )
        self.compiler = JaxCompiler(layout, gate if layout.is_mesh else Gate())
        # Reductions of stacked values, each by one collective in one program.
        self._totals = {
            ReduceOp.SUM: jit(_sum, _as_batch, out_shardings=layout.whole),
            ReduceOp.MEAN: jit(_mean, _as_batch, out_shardings=layout.whole),
        }
        self._running: weakref.WeakKeyDictionary[keras.Model, Running] = (
            weakref.WeakKeyDictionary()
        )

    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        return default_device(self._home.devices[0])

    def execution_scope(self) -> contextlib.AbstractContextManager[Any]:
        return self.layout.scope()

    def default_device(self) -> Any:
        return jax.config.jax_default_device

    def home(self, variable: keras.Variable) -> Home:
        return JaxHome(variable, self.plan, self.layout)

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
        if self.layout.is_wide:
            mark_even(value)

    def per_replica(self, values: Sequence[Any]) -> PerReplica:
        trace = current_trace()
        if trace is not None and trace.region is not None:
            of_region: PerReplica = trace.region.per_replica(values)
            return of_region
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
                    "replica, on the replica's own device. Received: "
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
        own = self.put(value, self.plan.primary)
        if isinstance(own, jax.core.Tracer):
            return own
        own = copy_of(own)
        return self._home.place(own)

    def combine(self, op: ReduceOp, values: Sequence[Any]) -> Any:
        trace = current_trace()
        if trace is not None:
            if trace.region is not None:
                combined = trace.region.combine(op, values)
                if combined is not None:
                    return combined
            if self.workers is not None:  # the values are of all replicas
                return combine(op, list(values))
        return super().combine(op, values)

    def combine_all(
        self, op: ReduceOp, values: Sequence[Sequence[Any]]
    ) -> list[Any]:
        if current_trace() is not None:
            return [self.combine(op, each) for each in values]
        return super().combine_all(op, values)

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
            self.workers.meet(f"a reduction by {op.name}", layout)
        result = self.gate.run(total, value.joined)
        return self._resting(self.layout.narrow(result))

    def _resting(self, array: Any) -> Any:
        """Puts a result on the devices where variables rest."""
        return array

    def bind(self, model: keras.Model) -> Mapping[str, Callable[..., Any]]:
        internals.forget_functions(model)
        trainer = self._trainer_of(model)
        self._running[model] = trainer.running
        return trainer.replacements()

    def _trainer_of(self, model: keras.Model) -> Trainer:
        return Trainer(Running(model, self.layout, self.gate))

    def trace_step(self, model: keras.Model, batch: Any) -> None:
        """Notes the programs of a step of `fit`, for a described batch."""
        self._trainer_of(model).trace_step(jax.tree.map(described, batch))

    def rows_in_fit(self, batch: Any) -> list[range]:
        return batches.shares(batch, self.plan.num_replicas)

    def recover(self, model: keras.Model) -> None:
        self._running[model].recover()

    def release(self, model: keras.Model) -> None:
        self._running[model].release()


class JaxCentralExecutor(JaxExecutor):
    """The executor of a plan with a single copy of each variable."""

    homes: Homes
    layout: MeshLayout

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        gate: Gate,
        workers: JaxWorkers | None = None,
    ) -> None:
        known = jax_devices()
        self._owners = Owners(plan.variable_devices)
        self.homes = Homes(
            self._owners, {d: known[d] for d in plan.variable_devices}
        )
        super().__init__(plan, layout, gate, workers)

    def home(self, variable: keras.Variable) -> CentralHome:
        keeper, layout = self._owners.of(variable), self.homes.of(variable)
        return CentralHome(variable, keeper, layout, self.layout.devices)

    def keep_together(
        self, variable: keras.Variable, reference: keras.Variable
    ) -> None:
        self._owners.keep_together(variable, reference)

    def _resting(self, array: Any) -> Any:
        return self.homes.place(array)

    def _trainer_of(self, model: keras.Model) -> Trainer:
        return CentralTrainer(
            CentralRunning(model, self.layout, self.gate, self.homes)
        )


def _as_batch(stacked: Any) -> dict[str, Any]:
    return {"batch": stacked}


def _sum(stacked: Any) -> Any:
    stacked = widened(ReduceOp.SUM, stacked)
    return jax.numpy.sum(stacked, axis=0, dtype=stacked.dtype)


def _mean(stacked: Any) -> Any:
    return ops.mean(stacked, axis=0)
