"""The native loops of `keras-dist bench workers` on PyTorch."""

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from keras_dist.bench.benchmarks import NativeWorkers
from keras_dist.bench.loops import BETA_1
from keras_dist.bench.loops import BETA_2
from keras_dist.bench.loops import EPSILON
from keras_dist.bench.loops import LEARNING_RATE
from keras_dist.bench.loops import Loop
from keras_dist.bench.loops import Setting
from keras_dist.bench.portable import build_model
from keras_dist.bench.worker_loops import rows_of
from keras_dist.plugin.workers import Workers
from keras_dist_torch.workers import TorchWorkers


class DataParallelWorkersLoop(Loop):
    """A Keras model in DistributedDataParallel, with torch's optimizer.

    It trains on the rows of worker `worker`.
    """

    def __init__(self, setting: Setting, worker: int) -> None:
        self._model = torch.nn.parallel.DistributedDataParallel(
            build_model(setting)
        )
        self._optimizer = torch.optim.Adam(
            self._model.parameters(),
            lr=LEARNING_RATE,
            betas=(BETA_1, BETA_2),
            eps=EPSILON,
        )
        self._batches = rows_of(setting, worker)

    def run(self, steps: int) -> float:
        model, optimizer = self._model, self._optimizer
        for x, y in itertools.islice(itertools.cycle(self._batches), steps):
            optimizer.zero_grad()
            # PyTorch's cross entropy takes no int32 labels.
            loss = torch.nn.functional.cross_entropy(
                model(torch.from_numpy(x)), torch.from_numpy(y).long()
            )
            loss.backward()
            optimizer.step()
        return float(loss.detach())


class TorchNativeWorkers(NativeWorkers):
    """DistributedDataParallel over a gloo process group of its own.

    The group's rendezvous uses the store of keras_dist's workers.
    """

    text = (
        "the Keras model in torch.nn.parallel.DistributedDataParallel "
        "over gloo, with torch.optim.Adam, in an eager loop; each process "
        "takes its rows of NumPy batches."
    )

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers)
        assert isinstance(workers, TorchWorkers)
        # Otherwise the profiler logs its start and stop.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with _on_loopback():
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("keras_dist/bench", workers.store),
                rank=self.worker,
                world_size=workers.cluster.num_workers,
            )

    def loop(self, setting: Setting) -> Loop:
        return DataParallelWorkersLoop(setting, self.worker)

    def collectives(self, loop: Loop, steps: int) -> int:
        with torch.autograd.profiler.profile() as profile:
            loop.run(steps)
        return sum(
            event.count
            for event in profile.key_averages()
            if event.key.startswith("gloo:")
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
