"""Communication between workers, by torch.distributed."""

import contextlib
import ctypes
import datetime
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_dist.core.options import CommunicationImplementation
from keras_dist.core.options import CommunicationOptions
from keras_dist.core.packing import in_packs
from keras_dist.core.packing import packs
from keras_dist.core.plan import Cluster
from keras_dist.errors import ClusterError
from keras_dist.errors import WorkerLostError
from keras_dist.joining.addresses import own_host
from keras_dist.plugin.heartbeats import SILENCE
from keras_dist.plugin.heartbeats import Heartbeats
from keras_dist.plugin.meetings import Meetings
from keras_dist.plugin.workers import Workers
from keras_dist_torch.stores import StoreBoard
from keras_dist_torch.stores import connect
from keras_dist_torch.stores import rendezvous

# Default seconds that a collective waits for workers that are alive.
TIMEOUT = 600.0
# Seconds that a worker waits at its end for the others to end.
PARTING = 10.0
# Words in errors of collectives that PyTorch starts itself.
_SIGNS = ("/gloo/", "ncclerror", "nccl error", "collective was aborted")
# Dtypes that collectives can't sum, and the wider ones that are sent instead.
_SUMMED_AS = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
}


class TorchWorkers(Workers):
    """Collectives over NCCL if each worker has its own GPUs, else over gloo."""

    def __init__(self, cluster: Cluster, options: CommunicationOptions) -> None:
        super().__init__(cluster, options)
        self._timeout = options.timeout_seconds or TIMEOUT
        self._has_lost = self._is_aborted = False
        own = ["nccl", *own_gpus()] if _wants_nccl(options) else ["gloo"]
        self.store, words = rendezvous(cluster, self._timeout, " ".join(own))
        self._is_nccl = may_use_nccl([word.split() for word in words], options)
        with self.named():
            self.group = self._group()
        self._beats = Heartbeats(
            cluster,
            StoreBoard(connect(cluster, self._timeout)),
            keeper=0,
            silence=min(SILENCE, self._timeout),
            on_loss=self._abort,
        )
        self._beats.start()
        self.meetings = Meetings(cluster, self._beats, self.check)

    def _group(self) -> Any:
        cluster = self.cluster
        store = dist.PrefixStore("keras_dist/group", self.store)
        if self._is_nccl:
            kind = dist.ProcessGroupNCCL
            settings = kind.Options()
        else:
            kind = dist.ProcessGroupGloo
            settings = kind._Options()
            # By default gloo listens at the address that the host name
            # resolves to, which may not be the worker's.
            own = cluster.addresses[cluster.index]
            host = own_host(own, cluster.leader)
            settings._devices = [kind.create_device(hostname=host)]
        settings._timeout = datetime.timedelta(seconds=self._timeout)
        return kind(store, cluster.index, cluster.num_workers, settings)

    def group_name(self) -> str:
        """Registers the group among PyTorch's backends, once."""
        name = "keras_dist"
        dist.Backend.register_backend(
            name, lambda *_: self.group, devices=["cpu", "cuda"]
        )
        return name

    def _abort(self) -> None:
        """Ends collectives that wait for lost workers."""
        self._is_aborted = True
        self.group.abort()

    def _wait(self, work: Any) -> None:
        """Waits for a collective; the sums of an aborted one are an error."""
        with self.waiting():
            work.wait()
        self._check()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Tells the others that this worker may wait for them, inside."""
        self._beats.enter()
        try:
            yield
        finally:
            self._beats.exit()

    def _check(self) -> None:
        """Raises if collectives were aborted, also those that GPUs wait for."""
        if self._is_nccl:
            # The wait is the GPU's, and it ends without an error on an abort.
            torch.cuda.current_stream().synchronize()
        if self._is_aborted:
            raise RuntimeError("The collective was aborted.")

    def check(self, in_background: bool = False) -> None:
        """Raises `WorkerLostError` if collectives so far were aborted."""
        if in_background and not self._is_aborted:
            return  # without a wait for GPUs
        with self.named():
            self._check()

    def _sendable(self, tensors: Sequence[Any]) -> list[Any]:
        """Moves tensors of the host to the primary GPU for NCCL."""
        if not self._is_nccl:
            return list(tensors)
        return [each.cuda() if each.is_cpu else each for each in tensors]

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        return in_packs(
            self._sum_of_one_dtype,
            packs([t.dtype for t in tensors]),
            self._sendable(tensors),
        )

    def _sum_of_one_dtype(self, tensors: list[torch.Tensor]) -> list[Any]:
        dtype = tensors[0].dtype
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        flat = flat.to(_SUMMED_AS.get(dtype, dtype))
        if flat.numel():
            self.start_sum(flat)()
        parts = flat.to(dtype).split([tensor.numel() for tensor in tensors])
        return [
            part.reshape(tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    def start_sum(self, flat: torch.Tensor) -> Callable[[], None]:
        """Starts to sum a flat tensor in place; returns the wait for it."""
        with self.named():
            work = self.group.allreduce([flat])

        def wait() -> None:
            with self.named():
                self._wait(work)

        return wait

    def scatter_sum(self, rows: torch.Tensor) -> torch.Tensor:
        """Sums a (workers, any) tensor; each worker gets its row."""
        wire = self.options.dtype
        if wire is not None and rows.dtype == torch.float32:
            arrived = self._all_to_all(rows.to(getattr(torch, wire)))
            return arrived.to(rows.dtype).sum(dim=0)
        if not self._is_nccl:
            return self._sum_of_rows(rows)
        own = torch.empty_like(rows[0])
        with self.named():
            self._wait(self.group._reduce_scatter_base(own, rows))
        return own

    @property
    def scatter_of_fsdp(self) -> Callable[[Any], Any] | None:
        """Returns what sums FSDP's gradients, `None` for its own way.

        Gloo's own reduce-scatter sends as much as an all-reduce.
        """
        return None if self._is_nccl else self._sum_of_rows

    def check_fsdp(self, device_type: str) -> None:
        """Raises if FSDP's collectives would end the process."""
        if device_type == "cpu" or self._is_nccl:
            return
        raise ClusterError(
            "Workers with GPUs need NCCL to keep variables in parts: on "
            "tensors of GPUs, gloo ends the process. Received: "
            "variables='sharded', and workers that share a GPU or use "
            "implementation=RING. Expected: a GPU for each worker, for "
            "instance with CUDA_VISIBLE_DEVICES, and implementation=AUTO."
        )

    def _sum_of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self._all_to_all(rows).sum(dim=0)

    def _all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends row `i` of each worker to worker `i`."""
        arrived = torch.empty_like(rows)
        with self.named():
            self._wait(
                self.group.alltoall_base(
                    arrived, rows, [], [], dist.AllToAllOptions()
                )
            )
        return arrived

    def gather_flat(self, own: torch.Tensor) -> torch.Tensor:
        """Concatenates the workers' flat tensors, which have equal lengths."""
        arrived = own.new_empty(self.cluster.num_workers * own.numel())
        with self.named():
            self._wait(self.group._allgather_base(arrived, own))
        return arrived

    def gather(self, tensors: Sequence[Any]) -> list[list[Any]]:
        packed = _bytes_of(self._sendable(tensors))
        outputs = [
            torch.empty_like(packed) for _ in range(self.cluster.num_workers)
        ]
        if packed.numel():
            self._gather_bytes(outputs, packed)
        return [_tensors_of(each, tensors) for each in outputs]

    def broadcast(self, tensors: Sequence[Any]) -> list[Any]:
        packed = _bytes_of(self._sendable(tensors))
        if packed.numel():
            with self.named():
                self._wait(self.group.broadcast([packed]))
        return _tensors_of(packed, tensors)

    def concatenate(self, tensor: Any, axis: int) -> Any:
        moved = torch.movedim(tensor, axis, 0).contiguous()
        sizes = self.concatenate_numbers([moved.shape[0]])
        padded = moved.new_zeros((max(sizes), *moved.shape[1:]))
        padded[: moved.shape[0]] = moved
        parts = [
            each[0][:size]
            for each, size in zip(self.gather([padded]), sizes, strict=True)
        ]
        return torch.movedim(torch.cat(parts), 0, axis)

    def leave(self, reason: str, failed: bool) -> None:
        # What was sent last may not have arrived yet.
        self._beats.stop(reason, patience=0 if failed else PARTING)
        if failed or self._has_lost:
            self.group.abort()
            # Never destroyed: its threads may wait forever, and destroying it
            # with them would abort the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Turns the error of a failed collective into `WorkerLostError`."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, WorkerLostError) or not hasattr(
                self, "_beats"
            ):
                raise
            raise self._lost() from error

    def explain(self, error: BaseException) -> BaseException:
        is_known = isinstance(error, WorkerLostError)
        text = str(error).lower()
        is_sign = any(sign in text for sign in _SIGNS)
        return self._lost() if is_sign and not is_known else error

    def _lost(self) -> WorkerLostError:
        self._has_lost = True
        who = self._beats.describe_lost() or (
            "every worker is alive, but not all of them took part within "
            f"{self._timeout:g} seconds"
        )
        return WorkerLostError(
            f"Worker {self.cluster.index} can't go on without the others: "
            f"{who}. See what that worker printed, and start all workers "
            "again, for instance with `keras-dist run --max-restarts`."
        )

    def _gather_bytes(
        self, outputs: list[torch.Tensor], packed: torch.Tensor
    ) -> None:
        with self.named():
            self._wait(self.group.allgather([outputs], [packed]))


def check_alone() -> None:
    """See `Backend.check_alone`."""
    if not dist.is_available() or not dist.is_initialized():
        return
    number = dist.get_world_size()
    if number > 1:
        raise ClusterError(
            "No cluster was found, so each worker would train alone. "
            "Received: a process that is in a group of torch.distributed with "
            f"{number - 1} others. Expected: variables that say who the "
            "workers are. Start the workers with torchrun, `keras-dist run`, "
            "SLURM or MPI, set TF_CONFIG, or pass a `cluster_resolver`."
        )


def _bytes_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Packs the bytes of tensors of any dtypes into one tensor."""
    return torch.cat(
        [
            tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            for tensor in tensors
            if tensor.numel()
        ]
        or [torch.empty(0, dtype=torch.uint8)]
    )


def _tensors_of(
    packed: torch.Tensor, like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Unpacks `_bytes_of` into tensors of the shapes and dtypes of `like`."""
    parts = packed.split([tensor.nbytes for tensor in like])
    return [
        # A copy, because its bytes may begin where its dtype is not aligned.
        part.clone().view(tensor.dtype).reshape(tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]


def _has_nccl() -> bool:
    """Returns whether this worker could use NCCL."""
    return bool(torch.cuda.is_available() and dist.is_nccl_available())


def own_gpus() -> list[str]:
    """Returns names of this worker's GPUs, which no other GPU has."""
    count = torch.cuda.device_count()
    return [
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(count)
    ]


def may_use_nccl(
    words: Sequence[Sequence[str]], options: CommunicationOptions
) -> bool:
    """Returns whether all workers use NCCL, from each one's means and GPUs."""
    if {means for means, *_ in words} != {"nccl"}:
        return False
    names = [name for _, *own in words for name in own]
    shared = sorted({name for name in names if names.count(name) > 1})
    if shared and options.implementation is CommunicationImplementation.NCCL:
        raise ClusterError(
            "NCCL refuses workers that share a GPU. Received: "
            f"implementation=NCCL, and several workers that see "
            f"{', '.join(shared)}. Expected: AUTO or RING, or a GPU for each "
            "worker, for instance with CUDA_VISIBLE_DEVICES."
        )
    return not shared


def _wants_nccl(options: CommunicationOptions) -> bool:
    """Returns whether this worker uses NCCL, if all the others do."""
    implementation, has_nccl = options.implementation, _has_nccl()
    if implementation is CommunicationImplementation.NCCL and not has_nccl:
        raise ClusterError(
            "NCCL needs GPUs. Received: implementation=NCCL on a worker "
            "without any. Expected: AUTO or RING."
        )
    return has_nccl and implementation is not CommunicationImplementation.RING
