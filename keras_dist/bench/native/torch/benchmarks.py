"""The loops and counts that `keras-dist bench` compares with on PyTorch."""

import functools
import gc
from collections.abc import Callable

import keras
import torch

from keras_dist.bench.benchmarks import Benchmarks
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.native.torch.fit import EagerLoop
from keras_dist.bench.native.torch.fit import loops_of_worker
from keras_dist.bench.native.torch.loops import KerasLoop
from keras_dist.bench.native.torch.loops import NativeLoop
from keras_dist.bench.native.torch.workers import TorchNativeWorkers
from keras_dist.bench.processes import Processes
from keras_dist.bench.profile import Profile
from keras_dist.bench.tasks import Task
from keras_dist.core.device import Device
from keras_dist.fit.binding import binding_of
from keras_dist.internals.keras_internals import all_variables
from keras_dist_torch.keras_internals import parameter_of
from keras_dist_torch.pieces import ShardedVariable
from keras_dist_torch.replica import TorchReplica


class TorchBenchmarks(Benchmarks):
    """Eager loops, and loops in DistributedDataParallel."""

    loop_text = (
        "torch.nn and torch.optim.Adam in an eager loop, without Keras; the "
        "global batch on the first device, however many replicas we have."
    )
    fits_text = (
        "loop is a Keras model and its optimizer in an eager loop written by "
        "hand, all of a batch on the first device. With several CPU devices "
        "there are as many processes too, which share the cores. In DDP each "
        "runs that loop around torch.nn.parallel.DistributedDataParallel over "
        "gloo, on its rows; processes is `fit` under "
        "MultiWorkerMirroredStrategy, as `keras-dist run` has it."
    )
    live_bytes_text = (
        "Measured: the storage of every live tensor of the process, once. "
        "PyTorch has one CPU: its virtual devices share memory, and what "
        "several of them use is there once, counted on the first. Plain Keras "
        "has the gradients of the last step until the next one."
    )
    native_workers = TorchNativeWorkers

    def native_loop(self, setting: Setting) -> Loop:
        return NativeLoop(setting)

    def other_loops(self, setting: Setting) -> dict[str, Loop]:
        return {"Keras": KerasLoop(setting)}

    def native_fits(
        self, task: Task, devices: tuple[str, ...]
    ) -> dict[str, Callable[[], Loop]]:
        """See `Benchmarks.native_fits`.

        On several CPU devices, some of the loops run in processes.
        """
        loops: dict[str, Callable[[], Loop]] = {
            "loop": lambda: EagerLoop(task, devices[0])
        }
        on_cpus = all(each.startswith("cpu:") for each in devices)
        if len(devices) > 1 and on_cpus:
            processes = Processes(
                functools.partial(loops_of_worker, task), len(devices)
            )
            for name in ("DDP", "processes"):
                loops[name] = functools.partial(processes.loop, name)
        return loops

    def fit_collectives(self, loop: Loop, steps: int, num_replicas: int) -> int:
        """Counts the meetings of the first replica with the others."""
        with Profile({TorchReplica.meet.__code__}) as profile:
            loop.run(steps)
        return profile.of_wanted

    def live_bytes(self, model: keras.Model) -> dict[Device, int]:
        """See `Benchmarks.live_bytes`.

        Storages on the CPU count for the virtual device whose variable they
        hold.
        """
        keepers = _keepers(model)
        storages = {}
        for each in gc.get_objects():
            if issubclass(type(each), torch.Tensor) and not each.is_meta:
                storage = each.untyped_storage()
                key = each.device, storage.data_ptr()
                storages[key] = storage.nbytes()
        totals: dict[Device, int] = {}
        for (device, pointer), num_bytes in storages.items():
            if device.type == "cuda":
                keeper = Device("gpu", device.index or 0)
            else:
                keeper = keepers.get(pointer, Device("cpu", 0))
            totals[keeper] = totals.get(keeper, 0) + num_bytes
        return totals


def _keepers(model: keras.Model) -> dict[int, Device]:
    """Maps the addresses of the variables' storages to their devices."""
    binding = binding_of(model)
    if binding is None:
        return {}
    strategy = binding.strategy
    keepers = {}
    for variable in all_variables(model):
        devices = strategy.executor.devices_of(variable)
        # A variable in parts has a tensor for each device, any other one
        # tensor: it counts for the first device.
        for tensor, device in zip(_tensors(variable), devices, strict=False):
            keepers[tensor.untyped_storage().data_ptr()] = device
    return keepers


def _tensors(variable: keras.Variable) -> list[torch.Tensor]:
    if isinstance(variable, ShardedVariable):
        tensors: list[torch.Tensor] = variable._pieces.tensors
        return tensors
    parameter = parameter_of(variable)
    return [] if parameter is None else [parameter]
