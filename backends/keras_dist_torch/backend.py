"""The PyTorch plugin: its devices, executors and workers."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import torch

from keras_dist.errors import DeviceError
from keras_dist.errors import VirtualDevicesError
from keras_dist.plugins import HOOKS
from keras_dist.plugins import Backend
from keras_dist.plugins import Cluster
from keras_dist.plugins import CommunicationOptions
from keras_dist.plugins import Device
from keras_dist.plugins import Differentiated
from keras_dist.plugins import Differentiates
from keras_dist.plugins import Executor
from keras_dist.plugins import Following
from keras_dist.plugins import Hook
from keras_dist.plugins import Plan
from keras_dist.plugins import SavesShards
from keras_dist.plugins import ShardsVariables
from keras_dist.plugins import Writing
from keras_dist.plugins import current
from keras_dist.plugins import leave_at_exit
from keras_dist_torch.compiler import TorchCompiler
from keras_dist_torch.gradients import detached
from keras_dist_torch.hooks import table
from keras_dist_torch.loss_weighting import differentiating
from keras_dist_torch.one_device import TorchExecutor
from keras_dist_torch.profiler import TorchProfiler
from keras_dist_torch.replica import Assigned
from keras_dist_torch.replica import noting_assigned
from keras_dist_torch.replicas import TorchCentralExecutor
from keras_dist_torch.replicas import TorchReplicaExecutor
from keras_dist_torch.workers import TorchWorkers
from keras_dist_torch.workers import check_alone


class TorchBackend(Backend, Differentiates, SavesShards, ShardsVariables):
    """The `Backend` over PyTorch's GPUs and virtual devices of its one CPU."""

    has_shards_on_devices = False

    def __init__(self) -> None:
        self._profiler = TorchProfiler()
        self._num_cpus = 1
        self._listed = False
        self._compiler = TorchCompiler()
        self._workers: TorchWorkers | None = None

    def hooks(self) -> Iterable[Hook]:
        return table()

    def list_devices(self) -> Sequence[Device]:
        self._listed = True
        return [
            *(Device("gpu", i) for i in range(torch.cuda.device_count())),
            *(Device("cpu", i) for i in range(self._num_cpus)),
        ]

    def set_virtual_devices(self, num_devices: int, device_type: str) -> None:
        if self._listed and num_devices != self._num_cpus:
            # PyTorch itself would allow this, but the same script has to work
            # on every backend.
            raise VirtualDevicesError(
                f"set_virtual_devices({num_devices}) was called after devices "
                f"were in use: there are {self._num_cpus} CPU devices. Call "
                "it before strategies are made and devices are listed, or "
                "set KERAS_DIST_VIRTUAL_DEVICES."
            )
        self._num_cpus = num_devices

    def join(self, cluster: Cluster, options: CommunicationOptions) -> None:
        if self._workers is None:
            self._workers = TorchWorkers(cluster, options)
            leave_at_exit(self._workers)
        else:
            self._workers.check_same(cluster, options)

    def check_alone(self) -> None:
        if self._workers is None:
            check_alone()

    def executor(self, plan: Plan) -> Executor:
        if plan.is_one_device:
            return TorchExecutor(plan)
        return TorchReplicaExecutor(plan, self._workers_of(plan))

    def central_executor(self, plan: Plan) -> Executor:
        return TorchCentralExecutor(plan, self._workers_of(plan))

    def sharded_executor(self, plan: Plan) -> Executor:
        workers, shards_all = self._workers_of(plan), plan.shards_variables
        if workers is None or (shards_all and plan.num_local_replicas > 1):
            raise _not_in_a_process(plan)
        # Late, because DTensor and FSDP take long to import.
        if not shards_all:
            from keras_dist_torch.slots import SlotsExecutor

            return SlotsExecutor(plan, workers)
        from keras_dist_torch.fsdp import FSDPExecutor

        return FSDPExecutor(plan, workers)

    def _workers_of(self, plan: Plan) -> TorchWorkers | None:
        return self._workers if plan.cluster else None

    def random_state(self) -> str:
        # The CPU's, and those of the GPUs in order.
        gpus = range(torch.cuda.device_count())
        states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus)]
        return " ".join(state.numpy().tobytes().hex() for state in states)

    def set_random_state(self, state: str) -> None:
        cpu, *gpus = [
            torch.frombuffer(bytearray.fromhex(encoded), dtype=torch.uint8)
            for encoded in state.split(" ")
        ]
        torch.set_rng_state(cpu)
        # Another worker may have more GPUs, or fewer.
        for index, gpu_state in enumerate(gpus[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(gpu_state, index)

    def check_saving(self) -> None:
        pass  # PyTorch has all that it takes

    def save_shards(
        self,
        model: keras.Model,
        executor: Executor | None,
        variables: Mapping[str, keras.Variable],
        folder: str,
        copies: bool,
    ) -> Writing:
        # Late, because DTensor takes long to import.
        from keras_dist_torch import checkpoints

        return checkpoints.save(executor, variables, folder, copies)

    def restore_shards(
        self,
        model: keras.Model,
        executor: Executor | None,
        variables: Mapping[str, keras.Variable],
        folder: str,
    ) -> None:
        from keras_dist_torch import checkpoints

        checkpoints.restore(variables, folder)

    def profiler(self) -> TorchProfiler:
        return self._profiler

    def compiler(self) -> TorchCompiler:
        return self._compiler

    def differentiate(
        self,
        fn: Callable[..., tuple[Any, Any]],
        variables: Sequence[keras.Variable],
        tensors: Sequence[Any],
    ) -> Differentiated:
        is_nested = current.depth > 0
        replica = differentiating()
        if replica is not None:
            differentiated: Differentiated = replica.differentiate(
                fn, variables, tensors, is_nested
            )
            return differentiated
        with torch.enable_grad():
            # New tensors: `fn` may use the caller's through a closure, and
            # those uses are not differentiated.
            copies = [
                t.view_as(t) if t.requires_grad else t.detach().requires_grad_()
                for t in tensors
            ]
            with (
                noting_assigned() as assigned,
                _read_as_leaves(variables, assigned) as leaves,
            ):
                value, aux = fn(*copies)
            more = [leaf for _, leaf in assigned]
            sources = [*leaves, *copies, *more]
            gradients = _gradients(value, sources, is_nested)
        places = {id(v): place for place, v in enumerate(variables)}
        for variable, _ in reversed(assigned):
            gradient, place = gradients.pop(), places.get(id(variable))
            if place is not None:
                gradients[place] = _sum_of(gradients[place], gradient)
        if not is_nested:
            # No derivative of these will be asked for: free their graphs.
            value, aux = keras.tree.map_structure(detached, (value, aux))
        return value, aux, gradients


def _not_in_a_process(plan: Plan) -> DeviceError:
    names = ", ".join(map(str, plan.devices))
    what = "variables" if plan.shards_variables else "optimizer_state"
    return DeviceError(
        "On PyTorch, each process keeps one part of what is sharded.\n"
        f"Received: {what}='sharded' with {names} of one process. Expected: a "
        "process for each device. Start them with `keras-dist run --workers`, "
        f"and use MultiWorkerMirroredStrategy({what}='sharded') there. Or "
        "use JAX, where a process keeps a part on each of its devices."
    )


def _sum_of(gradient: torch.Tensor, more: object) -> Any:
    """Adds gradients, each of which may be `None`."""
    if gradient is None or more is None:
        return more if gradient is None else gradient
    return gradient + more


@contextlib.contextmanager
def _read_as_leaves(
    variables: Sequence[keras.Variable], assigned: Assigned
) -> Iterator[list[torch.Tensor]]:
    """Makes variables read as leaves of autograd, which it yields.

    The leaves that it makes after assignments go to `assigned`.
    """

    def follow(variable: keras.Variable, value: torch.Tensor) -> torch.Tensor:
        if value.requires_grad:  # for a derivative around this one
            leaf = value.view_as(value)
        else:
            leaf = value.detach().clone().requires_grad_()
        assigned.append((variable, leaf))
        return leaf

    leaves = [variable.value for variable in variables]
    overlaid = []
    for index, variable in enumerate(variables):
        if not leaves[index].requires_grad:
            # A copy, because `fn` may assign the variable.
            leaves[index] = leaves[index].detach().clone().requires_grad_()
            overlaid.append((variable, leaves[index]))
    if not overlaid:
        yield leaves
        return
    overlay = Following(overlaid, follow)
    try:
        with HOOKS, overlay:
            yield leaves
    finally:
        overlay.release()


def _gradients(
    value: torch.Tensor, sources: list[torch.Tensor], is_nested: bool
) -> list[Any]:
    if not value.requires_grad:
        return [None] * len(sources)
    gradients = torch.autograd.grad(
        value, sources, allow_unused=True, create_graph=is_nested
    )
    return list(gradients)
