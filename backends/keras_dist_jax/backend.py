"""The entry point of the JAX backend: devices, executors and cluster."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import keras

from keras_dist.errors import ClusterError
from keras_dist.errors import DeviceError
from keras_dist.errors import UnsupportedModelError
from keras_dist.errors import VirtualDevicesError
from keras_dist.plugins import Backend
from keras_dist.plugins import Cluster
from keras_dist.plugins import CommunicationOptions
from keras_dist.plugins import CompiledProgram
from keras_dist.plugins import Compiler
from keras_dist.plugins import CompilesForTargets
from keras_dist.plugins import Device
from keras_dist.plugins import Differentiated
from keras_dist.plugins import Differentiates
from keras_dist.plugins import Executor
from keras_dist.plugins import HasLogicalDevices
from keras_dist.plugins import HasTPUs
from keras_dist.plugins import Hook
from keras_dist.plugins import Plan
from keras_dist.plugins import SavesShards
from keras_dist.plugins import ShardsVariables
from keras_dist.plugins import Target
from keras_dist.plugins import Writing
from keras_dist_jax import checkpoints
from keras_dist_jax import runtime_internals
from keras_dist_jax.cluster import start as joining
from keras_dist_jax.cluster.workers import JaxWorkers
from keras_dist_jax.cluster.workers import devices_of
from keras_dist_jax.executors.executor import JaxCentralExecutor
from keras_dist_jax.executors.executor import JaxExecutor
from keras_dist_jax.executors.logical import JaxLogicalExecutor
from keras_dist_jax.executors.sharded import JaxShardedExecutor
from keras_dist_jax.functions.compiler import JaxCompiler
from keras_dist_jax.functions.gradients import differentiate
from keras_dist_jax.hooks import table
from keras_dist_jax.machine import Machine
from keras_dist_jax.machine import compiling_for
from keras_dist_jax.machine import current_machine
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.placement.layout import MeshLayout
from keras_dist_jax.placement.layout import SingleLayout
from keras_dist_jax.placement.layout import WideLayout
from keras_dist_jax.placement.layout import jax_devices
from keras_dist_jax.placement.per_replica import register_trees
from keras_dist_jax.profiler import JaxProfiler
from keras_dist_jax.sharding import supported
from keras_dist_jax.targets.compilation import compiled_program
from keras_dist_jax.targets.topologies import machine_of
from keras_dist_jax.targets.tpus import tpu_places
from keras_dist_jax.targets.workers import TargetWorkers
from keras_dist_jax.throttle import OneAtATime
from keras_dist_jax.throttle import Throttle

runtime_internals.check()
register_trees()


class JaxBackend(
    Backend,
    CompilesForTargets,
    Differentiates,
    HasLogicalDevices,
    HasTPUs,
    SavesShards,
    ShardsVariables,
):
    """JAX on the devices of its default platform, and on the CPU's."""

    def __init__(self) -> None:
        self._profiler = JaxProfiler()
        self._cpu_throttle = OneAtATime()
        self._plain_compiler = JaxCompiler(None, Throttle())
        self._workers: JaxWorkers | None = None

    def hooks(self) -> Iterable[Hook]:
        return table()

    def list_devices(self) -> Sequence[Device]:
        return list(jax_devices())

    def set_virtual_devices(self, num_devices: int, device_type: str) -> None:
        try:
            jax.config.update("jax_num_cpu_devices", num_devices)
        except RuntimeError as error:  # JAX has started
            known = jax_devices()
            existing = sum(device.type == "cpu" for device in known)
            if existing == num_devices:
                return
            raise VirtualDevicesError(
                "set_virtual_devices was called after JAX had started.\n"
                f"Received: num_devices={num_devices}. Expected: {existing}, "
                "the number of CPU devices that exist. Call it right after "
                "the imports, before anything uses a device, or set the "
                "environment variable KERAS_DIST_VIRTUAL_DEVICES."
            ) from error

    def join(self, cluster: Cluster, options: CommunicationOptions) -> None:
        """See `Backend.join`.

        Of the options, `timeout_seconds` limits how long workers may take to
        come (300 by default), how long one may be silent before it is lost (60
        by default), and how long a live one may keep the others waiting while
        it does something else (600 by default). A worker that computes or
        compiles counts as neither. `dtype` is refused.
        """
        if self._workers is not None:
            known = self._workers.cluster, self._workers.options
            if known == (cluster, options):
                return
            raise ClusterError(
                "A process can join only one cluster, with one set of "
                f"options.\nReceived: {cluster}, {options}. Expected: "
                f"{known[0]}, {known[1]}, as the first time. Use one strategy "
                "for everything."
            )
        if current_machine() is not None:
            self._workers = TargetWorkers(cluster, options)
            return
        watch = joining.join(cluster, options)
        self._workers = JaxWorkers(cluster, options, watch, self._cpu_throttle)
        self._plain_compiler.agrees = True

    def check_optimizer(self, optimizer: keras.Optimizer) -> None:
        supported.check_optimizer(optimizer)

    def check_alone(self) -> None:
        if self._workers is None:
            joining.check_alone()

    def tpu_places(self) -> Sequence[Sequence[tuple[int, ...]]]:
        return tpu_places()

    def executor(self, plan: Plan) -> Executor:
        if plan.num_replicas > 1:
            return self._executor(JaxExecutor, plan)
        layout = SingleLayout(jax_devices()[plan.primary])
        return self._executor(JaxExecutor, plan, layout)

    def central_executor(self, plan: Plan) -> Executor:
        return self._executor(JaxCentralExecutor, plan)

    def sharded_executor(self, plan: Plan) -> Executor:
        return self._executor(JaxShardedExecutor, plan)

    def logical_executor(self, plan: Plan) -> Executor:
        if len({*map(len, plan.replicas)}) > 1:
            raise DeviceError(
                "All replicas have the same number of logical devices. "
                f"Received: {plan}. Expected: as many for each replica."
            )
        return self._executor(JaxLogicalExecutor, plan)

    def _executor(
        self,
        make: type[JaxExecutor],
        plan: Plan,
        layout: Layout | None = None,
    ) -> JaxExecutor:
        layout = layout or mesh_of(plan, self._workers)
        throttle: Throttle = (
            self._cpu_throttle if layout.one_at_a_time else Throttle()
        )
        if current_machine() is not None:  # no program runs
            throttle = Throttle()
        if plan.cluster is None:
            return make(plan, layout, throttle)
        if self._workers is None:
            raise ClusterError(
                "A plan for several workers was used before this process "
                f"joined its cluster. Received: {plan.cluster}. Call "
                "`Backend.join` first."
            )
        throttle = self._workers.watched(throttle)
        return make(plan, layout, throttle, self._workers)

    @contextlib.contextmanager
    def on_target(self, target: Target) -> Iterator[Sequence[int]]:
        machine, before = machine_of(target), self._workers
        self._workers = None
        try:
            with compiling_for(machine):
                yield [len(devices) for devices in machine.devices]
        except Exception as error:
            # It may be due to a result that has no values.
            _check_nothing_ran(machine, error)
            raise
        finally:
            self._workers = before

    def compiled_step(
        self, executor: Executor, model: keras.Model, batch: object
    ) -> list[CompiledProgram]:
        assert isinstance(executor, JaxExecutor)
        machine = current_machine()
        assert machine is not None
        _check_nothing_ran(machine)
        try:
            executor.trace_step(model, batch)
            return self.compiled_programs()
        finally:
            machine.noted.clear()

    def compiled_programs(self) -> list[CompiledProgram]:
        """Compiles the programs that were noted since the last call."""
        machine = current_machine()
        assert machine is not None
        noted, machine.noted[:] = list(machine.noted), []
        return [compiled_program(program, machine) for program in noted]

    def check_saving(self) -> None:
        checkpoints.load_orbax()

    def save_shards(
        self,
        model: keras.Model,
        executor: Executor | None,
        variables: Mapping[str, keras.Variable],
        folder: str,
        copies: bool,
    ) -> Writing:
        assert executor is None or isinstance(executor, JaxExecutor)
        return checkpoints.save(model, executor, variables, folder)

    def restore_shards(
        self,
        model: keras.Model,
        executor: Executor | None,
        variables: Mapping[str, keras.Variable],
        folder: str,
    ) -> None:
        assert executor is None or isinstance(executor, JaxExecutor)
        checkpoints.restore(model, executor, variables, folder)

    def profiler(self) -> JaxProfiler:
        return self._profiler

    def compiler(self) -> Compiler:
        return self._plain_compiler

    def print(
        self, values: Sequence[Any], sep: str, end: str, replica: object
    ) -> None:
        leaves, structure = jax.tree.flatten((list(values), replica))
        traced = {
            index: leaf
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, jax.core.Tracer)
        }
        if not traced:
            super().print(values, sep, end, replica)
            return
        known = [None if i in traced else leaf for i, leaf in enumerate(leaves)]

        def show(computed: dict[int, Any]) -> None:
            shown = [computed.get(i, leaf) for i, leaf in enumerate(known)]
            values, replica = structure.unflatten(shown)
            Backend.print(self, values, sep, end, replica)

        jax.debug.callback(show, traced)

    def differentiate(
        self,
        fn: Callable[..., tuple[Any, Any]],
        variables: Sequence[keras.Variable],
        tensors: Sequence[Any],
    ) -> Differentiated:
        return differentiate(fn, variables, tensors)


def _check_nothing_ran(
    machine: Machine, cause: Exception | None = None
) -> None:
    if machine.noted:
        names = sorted({program.traced.fun_name for program in machine.noted})
        raise UnsupportedModelError(
            "Programs were to run before the training step. Received: "
            f"{', '.join(names)}. Expected: a function that makes and "
            "compiles a model, and neither trains nor runs it."
        ) from cause


def mesh_of(plan: Plan, workers: JaxWorkers | None = None) -> MeshLayout:
    """Makes the layout of all devices that compute."""
    known = jax_devices()
    if len({device.type for device in plan.all_devices}) > 1:
        names = ", ".join(str(device) for device in plan.all_devices)
        raise DeviceError(
            "On JAX, the replicas of a strategy run one program together, so "
            f"they need devices of one type. Received: {names}. Expected: all "
            "'cpu', all 'gpu' or all 'tpu'."
        )
    replicas = [
        [known[device] for device in replica] for replica in plan.replicas
    ]
    if plan.cluster is None or plan.num_workers == 1 or workers is None:
        return MeshLayout(replicas)
    first = replicas[0][0]
    everyone = devices_of(plan.cluster, first.platform)
    local = everyone[plan.cluster.index]
    if first not in local:
        # The hosts of a TPU have positions of their own.
        raise ClusterError(
            "JAX numbers the workers in another order.\nReceived: worker "
            f"{plan.cluster.index}, whose devices are those of JAX' process "
            f"{first.process_index}. Expected: the same number. List the "
            "workers in the order of the TPU's hosts (TPU_WORKER_ID)."
        )
    places = [[*map(local.index, replica)] for replica in replicas]
    return WideLayout(
        [
            [[devices[i] for i in group] for group in places]
            for devices in everyone
        ],
        plan.cluster.index,
        workers,
    )
