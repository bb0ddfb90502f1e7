"""Training with PyTorch: eager loops, and DistributedDataParallel."""

import contextlib
import functools
import gc
import os
import socket
import time

import keras
import torch
import torch.distributed as dist

import keras_dist
from bench import settings
from bench.processes import Processes
from keras_dist.bench.fit import FitArm
from keras_dist.bench.fit import on_device
from keras_dist.core.device import Device
from keras_dist.internals.keras_saveables import all_variables
from keras_dist.plugin.front_end import bound
from keras_dist_torch.keras_internals import parameter_of

LOOP_TEXT = (
    "torch.nn and torch.optim.Adam in an eager loop, without Keras; the "
    "global batch on the first device, however many replicas we have."
)
FITS_TEXT = (
    "loop is a Keras model and its optimizer in an eager loop written by "
    "hand, all of a batch on the first device. With several CPU devices, "
    "two more arms run one process for each, and the processes share the "
    "cores. In DDP each process runs that loop around "
    "torch.nn.parallel.DistributedDataParallel over gloo, on its rows; "
    "processes is `fit` under MultiWorkerMirroredStrategy, as "
    "`keras-dist run` starts it."
)
LIVE_BYTES_TEXT = (
    "Measured: the storage of every live tensor of the process, once. "
    "PyTorch has one CPU: its virtual devices share memory, and a tensor "
    "that several of them use exists once and counts on the first. Plain "
    "Keras keeps the gradients of a step until the next step."
)

# Seconds until a thread has noted, surely, what it has done.
_NOTING = 0.5


def _torch_loop(model, batches, place=None, **options):
    """Returns an eager loop of a torch.nn model and torch's optimizer."""
    optimizer = torch.optim.Adam(
        model.parameters(),
        lr=settings.LEARNING_RATE,
        eps=settings.EPSILON,
        **options,
    )

    def step(x, y):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return settings.StepLoop(step, batches, place)


def _keras_loop(setting):
    """Returns an eager loop around a Keras model and optimizer."""
    with keras.device(str(_device(setting))):
        model, optimizer = setting.model_and_optimizer()
    variables = model.trainable_variables

    def step(x, y):
        model.zero_grad()
        loss = settings.row_losses(y, model(x, training=True)).mean()
        return _applied(loss, optimizer, variables)

    return settings.StepLoop(step, _all_placed(setting))


def _applied(loss, optimizer, variables):
    loss.backward()
    with torch.no_grad():
        optimizer.apply([each.value.grad for each in variables], variables)
    return loss


def _sequential(setting):
    layers = []
    weights = setting.weights()
    for kernel, bias in zip(weights[::2], weights[1::2], strict=True):
        layer = torch.nn.Linear(*kernel.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(kernel.T))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def _device(setting):
    kind, _, index = setting.devices[0].partition(":")
    return torch.device("cpu" if kind == "cpu" else f"cuda:{index}")


def _all_placed(setting):
    device = _device(setting)
    return [_placed(batch, device) for batch in setting.batches()]


def _placed(batch, device):
    x, y = batch
    # PyTorch's cross entropy takes no int32 labels.
    return (
        torch.from_numpy(x).to(device),
        torch.from_numpy(y).to(device, torch.int64),
    )


class EagerLoop(settings.StepLoop):
    """An eager loop around a Keras model and optimizer, on one device."""

    def __init__(self, task, device):
        placed = functools.partial(on_device, device)
        super().__init__(self._train, runs_in=placed)
        with placed():
            self.model = task.model()
        self._task = task
        self._forward = self.model

    def _train(self, x, y):
        self.model.zero_grad()
        outputs = self._forward(x, training=True)
        loss = self.model.compute_loss(x, y, outputs)
        variables = self.model.trainable_variables
        return _applied(loss, self.model.optimizer, variables)

    def feed(self, steps):
        for batch in settings.batches_of(self._task, steps):
            yield map(self._placed, batch)

    def _placed(self, array):
        return keras.ops.convert_to_tensor(array)


class DataParallelLoop(EagerLoop):
    """An `EagerLoop` in DistributedDataParallel, on one worker's rows."""

    def __init__(self, task, cluster, device="cpu:0"):
        super().__init__(task, device)
        each = task.rows // cluster.num_workers
        self._rows = slice(cluster.index * each, (cluster.index + 1) * each)
        self._forward = torch.nn.parallel.DistributedDataParallel(self.model)

    def _placed(self, array):
        return super()._placed(array[self._rows])


def native_loop(setting):
    model = _sequential(setting).to(_device(setting))
    return _torch_loop(model, _all_placed(setting))


def other_loops(setting):
    return {"Keras": _keras_loop(setting)}


def native_fits(task, devices, stack):
    found = {"loop": lambda: EagerLoop(task, devices[0])}
    if len(devices) > 1 and devices[0].startswith("cpu:"):
        processes = Processes(
            functools.partial(_arms_of_worker, task), len(devices)
        )
        stack.callback(processes.close)
        for name in ("DDP", "processes"):
            found[name] = functools.partial(processes.arm, name)
    return found


@contextlib.contextmanager
def _arms_of_worker(task):
    """Gives one process of several its arms: DDP, and `fit` in keras_dist."""
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    workers = strategy.executor.workers
    native = NativeWorkers(workers)
    try:
        yield {
            "DDP": DataParallelLoop(task, workers.cluster),
            "processes": FitArm(task, strategy.scope),
        }
    finally:
        native.close()


def live_bytes(model):
    parameter_devices = _keepers(model)
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and not each.is_meta:
            storage = each.untyped_storage()
            key = each.device, storage.data_ptr()
            storages[key] = storage.nbytes()
    totals = {}
    for (device, pointer), num_bytes in storages.items():
        if device.type == "cuda":
            keeper = Device("gpu", device.index or 0)
        else:
            # Of the virtual device whose variable it holds.
            keeper = parameter_devices.get(pointer, Device("cpu", 0))
        totals[keeper] = totals.get(keeper, 0) + num_bytes
    return totals


def _keepers(model):
    """Maps the addresses of the variables' storages to their devices."""
    binding = bound(model)
    if binding is None:
        return {}
    parameter_devices = {}
    for variable in all_variables(model):
        first, *_ = binding.strategy.executor.storage(variable).devices
        parameter = parameter_of(variable)
        if parameter is not None:
            parameter_devices[parameter.untyped_storage().data_ptr()] = first
    return parameter_devices


class NativeWorkers:
    """DistributedDataParallel over a process group of its own."""

    text = (
        "the Keras model in torch.nn.parallel.DistributedDataParallel "
        "over gloo, or NCCL on GPUs, with torch.optim.Adam, in an eager loop; "
        "each process takes its rows of NumPy batches. DDP: the same loop "
        "with the model's own optimizer, of Keras. Fused: the native loop with "
        "`fused=True`. Fit, compiled: `fit` with `jit_compile=True`."
    )

    def __init__(self, workers):
        self._cluster = workers.cluster
        # Otherwise the profiler logs its start and stop.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with _on_loopback():
            dist.init_process_group(
                "nccl" if torch.cuda.is_available() else "gloo",
                store=dist.PrefixStore("keras_dist/bench", workers.store),
                rank=self._cluster.index,
                world_size=self._cluster.num_workers,
            )

    def loop(self, setting, **options):
        return _torch_loop(
            torch.nn.parallel.DistributedDataParallel(setting.model()),
            setting.rows_of(self._cluster.index),
            functools.partial(_placed, device=_device(setting)),
            **options,
        )

    def other_loops(self, setting, strategy):
        task, device = setting.task(), setting.devices[0]
        compiled = setting.task(jit_compile=True)
        return {
            "DDP": DataParallelLoop(task, self._cluster, device),
            "fused": self.loop(setting, fused=True),
            "fit, compiled": FitArm(compiled, strategy.scope),
        }

    def collectives(self, arm, steps):
        """Counts the collectives of this process in `steps` steps."""
        with torch.autograd.profiler.profile() as profile:
            arm(steps)
            # Gloo's thread notes a collective after DDP has its result.
            time.sleep(_NOTING)
        return sum(
            event.count
            for event in profile.key_averages()
            if event.key.startswith(("gloo:", "nccl:"))
        )

    def close(self):
        dist.destroy_process_group()


@contextlib.contextmanager
def _on_loopback():
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
