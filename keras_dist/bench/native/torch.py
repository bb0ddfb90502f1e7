"""Benchmarks of PyTorch."""

import functools
import gc
import os
import socket
import time
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch
import torch.distributed as dist

from keras_dist.bench import loops
from keras_dist.bench import tasks
from keras_dist.bench.benchmarks import Benchmarks
from keras_dist.bench.benchmarks import NativeWorkers
from keras_dist.bench.measure import Profile
from keras_dist.bench.processes import Processes
from keras_dist.core.device import Device
from keras_dist.core.plan import Cluster
from keras_dist.internals.keras_saveables import all_variables
from keras_dist.plugin.front_end import bound
from keras_dist.plugin.workers import Workers
from keras_dist.strategies.multi_worker_mirrored import (
    MultiWorkerMirroredStrategy,
)
from keras_dist_torch.keras_internals import parameter_of
from keras_dist_torch.replica import TorchReplica
from keras_dist_torch.workers import TorchWorkers

# Seconds until a thread has noted, surely, what it has done.
_NOTING = 0.5


def _native_loop(
    model: torch.nn.Module,
    batches: list[Any],
    place: Callable[[Any], Any] | None = None,
) -> loops.Loop:
    """Returns an eager loop of a torch.nn model and torch's optimizer."""
    optimizer = torch.optim.Adam(
        model.parameters(), lr=loops.LEARNING_RATE, eps=loops.EPSILON
    )

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return loops.StepLoop(step, batches, place)


def _keras_loop(setting: loops.Setting) -> loops.Loop:
    """Returns an eager loop around a Keras model and optimizer."""
    device = _device(setting)
    with keras.device(str(device)):
        model, optimizer = setting.model_and_optimizer()
    variables = model.trainable_variables

    def step(x: Any, y: Any) -> Any:
        model.zero_grad()
        loss = loops.row_losses(y, model(x, training=True)).mean()
        return _applied(loss, optimizer, variables)

    return loops.StepLoop(step, _all_placed(setting))


def _applied(loss: Any, optimizer: Any, variables: list[Any]) -> Any:
    loss.backward()
    with torch.no_grad():
        optimizer.apply([each.value.grad for each in variables], variables)
    return loss


def _sequential(setting: loops.Setting) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    weights = setting.weights()
    for kernel, bias in zip(weights[::2], weights[1::2], strict=True):
        layer = torch.nn.Linear(*kernel.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(kernel.T))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def _device(setting: loops.Setting) -> torch.device:
    kind, _, index = setting.devices[0].partition(":")
    return torch.device("cpu" if kind == "cpu" else f"cuda:{index}")


def _all_placed(setting: loops.Setting) -> list[tuple[Any, Any]]:
    device = _device(setting)
    return [_placed(batch, device) for batch in setting.batches()]


def _placed(batch: tuple[Any, Any], device: torch.device) -> tuple[Any, Any]:
    x, y = batch
    # PyTorch's cross entropy takes no int32 labels.
    return (
        torch.from_numpy(x).to(device),
        torch.from_numpy(y).to(device, torch.int64),
    )


class EagerLoop(tasks.ModelLoop):
    """An eager loop around a Keras model and optimizer, on one device."""

    def __init__(self, task: tasks.Task, device: str) -> None:
        self.runs_in = functools.partial(tasks.on_device, device)
        with self.runs_in():
            super().__init__(task.model(), step=EagerLoop._train)
        self.step = self._train
        self._task = task
        self._forward: Callable[..., Any] = self.model

    def _train(self, x: Any, y: Any) -> Any:
        self.model.zero_grad()
        outputs = self._forward(x, training=True)
        loss = self.model.compute_loss(x, y, outputs)
        variables = self.model.trainable_variables
        return _applied(loss, self.model.optimizer, variables)

    def feed(self, steps: int) -> Iterable[tuple[Any, ...]]:
        for batch in self._task.batches(steps):
            yield keras.tree.map_structure(self._placed, batch)

    def _placed(self, array: Any) -> Any:
        return keras.ops.convert_to_tensor(array)


class DataParallelLoop(EagerLoop):
    """An `EagerLoop` in DistributedDataParallel, on one worker's rows."""

    def __init__(
        self, task: tasks.Task, cluster: Cluster, device: str = "cpu:0"
    ) -> None:
        super().__init__(task, device)
        each = task.size.rows // cluster.num_workers
        self._rows = slice(cluster.index * each, (cluster.index + 1) * each)
        self._forward = torch.nn.parallel.DistributedDataParallel(self.model)

    def _placed(self, array: Any) -> Any:
        return super()._placed(array[self._rows])


class TorchNativeWorkers(NativeWorkers):
    """DistributedDataParallel over a process group of its own."""

    text = (
        "the Keras model in torch.nn.parallel.DistributedDataParallel "
        "over gloo, or NCCL on GPUs, with torch.optim.Adam, in an eager loop; "
        "each process takes its rows of NumPy batches. DDP: the same loop "
        "with the model's own optimizer, of Keras."
    )

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers)
        self._cluster = workers.cluster
        assert isinstance(workers, TorchWorkers)
        # Otherwise the profiler logs its start and stop.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with _on_loopback():
            dist.init_process_group(
                "nccl" if torch.cuda.is_available() else "gloo",
                store=dist.PrefixStore("keras_dist/bench", workers.store),
                rank=self.worker,
                world_size=workers.cluster.num_workers,
            )

    def loop(self, setting: loops.Setting) -> loops.Loop:
        return _native_loop(
            torch.nn.parallel.DistributedDataParallel(setting.model()),
            setting.rows_of(self.worker),
            functools.partial(_placed, device=_device(setting)),
        )

    def other_loops(self, setting: loops.Setting) -> dict[str, loops.Loop]:
        task, device = tasks.task_of(setting.size), setting.devices[0]
        return {"DDP": DataParallelLoop(task, self._cluster, device)}

    def collectives(self, loop: loops.Loop, steps: int) -> int:
        with torch.autograd.profiler.profile() as profile:
            loop.run(steps)
            # Gloo's thread notes a collective after DDP has its result.
            time.sleep(_NOTING)
        return sum(
            event.count
            for event in profile.key_averages()
            if event.key.startswith(("gloo:", "nccl:"))
        )

    def close(self) -> None:
        dist.destroy_process_group()


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Makes gloo listen on the loopback interface only."""
    names = [name for _, name in socket.if_nameindex()]
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    loopback = next((name for name in names if name.startswith("lo")), None)
    if loopback is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        if before is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = before


@contextmanager
def loops_of_worker(task: tasks.Task) -> Iterator[dict[str, loops.Loop]]:
    """Gives one process of several its loops: DDP, and `fit` in keras_dist."""
    strategy = MultiWorkerMirroredStrategy()
    workers = strategy.executor.workers
    assert workers is not None
    native = TorchNativeWorkers(workers)
    try:
        yield {
            "DDP": DataParallelLoop(task, workers.cluster),
            "processes": tasks.FitLoop(task, strategy.scope),
        }
    finally:
        native.close()


class TorchBenchmarks(Benchmarks):
    """Eager loops, and loops in DistributedDataParallel."""

    loop_text = (
        "torch.nn and torch.optim.Adam in an eager loop, without Keras; the "
        "global batch on the first device, however many replicas we have."
    )
    fits_text = (
        "loop is a Keras model and its optimizer in an eager loop written by "
        "hand, all of a batch on the first device. With several CPU devices, "
        "two more arms run one process for each, and the processes share the "
        "cores. In DDP each process runs that loop around "
        "torch.nn.parallel.DistributedDataParallel over gloo, on its rows; "
        "processes is `fit` under MultiWorkerMirroredStrategy, as "
        "`keras-dist run` starts it."
    )
    live_bytes_text = (
        "Measured: the storage of every live tensor of the process, once. "
        "PyTorch has one CPU: its virtual devices share memory, and a tensor "
        "that several of them use exists once and counts on the first. Plain "
        "Keras keeps the gradients of a step until the next step."
    )
    native_workers = TorchNativeWorkers

    def native_loop(self, setting: loops.Setting) -> loops.Loop:
        model = _sequential(setting).to(_device(setting))
        return _native_loop(model, _all_placed(setting))

    def other_loops(self, setting: loops.Setting) -> dict[str, loops.Loop]:
        return {"Keras": _keras_loop(setting)}

    def native_fits(
        self, task: tasks.Task, devices: tuple[str, ...]
    ) -> dict[str, Callable[[], loops.Loop]]:
        found: dict[str, Callable[[], loops.Loop]] = {
            "loop": lambda: EagerLoop(task, devices[0])
        }
        on_cpus = all(each.startswith("cpu:") for each in devices)
        if len(devices) > 1 and on_cpus:
            processes = Processes(
                functools.partial(loops_of_worker, task), len(devices)
            )
            for name in ("DDP", "processes"):
                found[name] = functools.partial(processes.loop, name)
        return found

    def fit_collectives(
        self, loop: loops.Loop, steps: int, num_replicas: int
    ) -> int:
        """Counts the rendezvous of the first replica with the others."""
        with Profile({TorchReplica.rendezvous.__code__}) as profile:
            loop.run(steps)
        return profile.of_wanted

    def live_bytes(self, model: keras.Model) -> dict[Device, int]:
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
                # Of the virtual device whose variable it holds.
                keeper = keepers.get(pointer, Device("cpu", 0))
            totals[keeper] = totals.get(keeper, 0) + num_bytes
        return totals


def _keepers(model: keras.Model) -> dict[int, Device]:
    """Maps the addresses of the variables' storages to their devices."""
    binding = bound(model)
    if binding is None:
        return {}
    strategy = binding.strategy
    keepers = {}
    for variable in all_variables(model):
        first, *_ = strategy.executor.home(variable).devices
        parameter = parameter_of(variable)
        if parameter is not None:
            keepers[parameter.untyped_storage().data_ptr()] = first
    return keepers
