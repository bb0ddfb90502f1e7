"""Communication between workers, by torch.distributed."""

import contextlib
import ctypes
import datetime
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist

from keras_dist.errors import ClusterError
from keras_dist.errors import KerasDistError
from keras_dist.errors import WorkerLostError
from keras_dist.plugins import NO_BODY
from keras_dist.plugins import SILENCE
from keras_dist.plugins import Body
from keras_dist.plugins import Call
from keras_dist.plugins import Cluster
from keras_dist.plugins import CommunicationImplementation
from keras_dist.plugins import CommunicationOptions
from keras_dist.plugins import Heartbeats
from keras_dist.plugins import Like
from keras_dist.plugins import Messages
from keras_dist.plugins import Workers
from keras_dist.plugins import in_packs
from keras_dist.plugins import lost_error
from keras_dist.plugins import own_host
from keras_dist.plugins import packs
from keras_dist_torch.flat import bytes_of
from keras_dist_torch.flat import split_as
from keras_dist_torch.flat import tensors_of
from keras_dist_torch.look import Look
from keras_dist_torch.stores import StoreBoard
from keras_dist_torch.stores import connect
from keras_dist_torch.stores import open_store
from keras_dist_torch.sums import ExpectedSums
from keras_dist_torch.sums import Sum
from keras_dist_torch.sums import part_of

# Default seconds that a collective waits for workers that are alive.
TIMEOUT = 600.0
# Seconds that a worker waits at its end for the others to end.
PARTING = 10.0
# How long gloo waits at a time.
_TURN = datetime.timedelta(seconds=0.5)
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

    # At the step that runs now, to compile it.
    look: Look | None = None

    def __init__(self, cluster: Cluster, options: CommunicationOptions) -> None:
        super().__init__(cluster, options)
        self._timeout = options.timeout_seconds or TIMEOUT
        self._has_lost = self._is_aborted = False
        local_words = (
            ["nccl", *own_gpus()] if _wants_nccl(options) else ["gloo"]
        )
        self.store, words = open_store(
            cluster, self._timeout, " ".join(local_words)
        )
        self._is_nccl = may_use_nccl([word.split() for word in words], options)
        with self.named():
            self.group = self._group("group", self._is_nccl)
            # Frames are apart from other messages, which they are not mistaken
            # for, and pass through the host's memory alone.
            self._frames = self._group("frames", is_nccl=False)
        device = torch.device("cuda" if self._is_nccl else "cpu")
        self.sums = ExpectedSums(self.start_sum, device)
        self._beats = Heartbeats(
            cluster,
            StoreBoard(connect(cluster, self._timeout)),
            server=0,
            silence=min(SILENCE, self._timeout),
            on_loss=self._abort,
        )
        self._beats.recorder = self.recorder
        self._beats.start()
        self.messages = Messages(cluster, self._beats, self.check)

    def _group(self, name: str, is_nccl: bool) -> Any:
        cluster = self.cluster
        store = dist.PrefixStore(f"keras_dist/{name}", self.store)
        if is_nccl:
            kind = dist.ProcessGroupNCCL
            settings = kind.Options()
        else:
            kind = dist.ProcessGroupGloo
            settings = kind._Options()
            # By default gloo listens at the address that the host name
            # resolves to, which may not be the worker's.
            address = cluster.addresses[cluster.index]
            host = own_host(address, cluster.leader)
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
        for group in (self.group, self._frames):
            group.abort()

    def _wait(self, work: Any) -> None:
        """Waits for a collective; the sums of an aborted one are an error."""
        if self._is_nccl:
            work.wait()
            self._check()
        else:
            self._wait_on_host(work)

    def _wait_on_host(self, work: Any) -> None:
        """Waits for a collective of gloo, whose waits no abort ends."""
        is_over = False
        while not is_over:
            try:
                is_over = work.wait(_TURN)
            except RuntimeError:  # that it takes longer, or the work's own
                if work.is_completed():
                    is_over = work.wait()
            self._check_aborted()

    def _check(self) -> None:
        """Raises if collectives were aborted, also those that GPUs wait for."""
        if self._is_nccl:
            # The wait is the GPU's, and it ends without an error on an abort.
            torch.cuda.current_stream().synchronize()
        self._check_aborted()

    def _check_aborted(self) -> None:
        if self._is_aborted:
            raise RuntimeError("The collective was aborted.")

    def check(self, in_background: bool = False) -> None:
        """Raises `WorkerLostError` if collectives so far were aborted."""
        if in_background and not self._is_aborted:
            return  # without a wait for GPUs
        with self.named():
            self._check()

    def call(self, what: str, layout: str) -> Call:
        if self.look is not None:
            self.look.calls(what)
        return super().call(what, layout)

    def swap(self, data: np.ndarray) -> np.ndarray:
        # A copy, because a frozen array would be a warning.
        sent = torch.from_numpy(data.copy())
        arrived = torch.empty(
            (self.cluster.num_workers, sent.numel()), dtype=torch.uint8
        )
        if sent.numel():
            with self.named():
                self._wait_on_host(
                    self._frames._allgather_base(arrived.reshape(-1), sent)
                )
        return np.asarray(arrived)

    def exchange(
        self, call: Call, head: bytes, body: Body = NO_BODY
    ) -> tuple[list[bytes], list[bytes] | None]:
        self.sums.give_up()
        result = super().exchange(call, head, body)
        self.sums.follow(call.key)
        return result

    def forget_calls(self) -> None:
        super().forget_calls()
        self.sums.forget()

    def on_host(self, tensor: torch.Tensor) -> np.ndarray:
        value = torch.as_tensor(tensor).detach().cpu()
        if value.dtype == torch.bfloat16:
            words = np.asarray(value.contiguous().view(torch.int16))
            return words.view(ml_dtypes.bfloat16)
        return np.asarray(value.resolve_conj())

    def here(self, value: np.ndarray) -> Any:
        if value.dtype == ml_dtypes.bfloat16:
            words = torch.from_numpy(value.view(np.int16).copy())
            tensor = words.view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(np.array(value))
        return tensor.cuda() if self._is_nccl else tensor

    def _sendable(self, tensors: Sequence[Any]) -> list[Any]:
        """Moves tensors of the host to the primary GPU for NCCL."""
        if not self._is_nccl:
            return list(tensors)
        return [
            tensor.cuda() if tensor.is_cpu else tensor for tensor in tensors
        ]

    def sum(self, tensors: Sequence[Any], *, what: str = "a sum") -> list[Any]:
        if self.is_small(sum(tensor.nbytes for tensor in tensors)):
            return super().sum(tensors, what=what)
        layout = ", ".join(str(Like.of(tensor)) for tensor in tensors)
        tensors = self._sendable(tensors)
        groups = packs([tensor.dtype for tensor in tensors])
        flats = [
            _flat([tensors[index] for index in indices]) for indices in groups
        ]
        call = self.call(what, layout)
        self.sum_expected(Sum(call, "", (), part_of(flats[0])), flats[0])
        for flat in flats[1:]:
            self.start_sum(flat)()
        summed = iter(flats)
        return in_packs(lambda pack: _like(next(summed), pack), groups, tensors)

    def sum_expected(self, this_sum: Sum, last: torch.Tensor) -> None:
        """Sums a flat tensor in place, whose last element is for the flag."""
        self.agree(this_sum)
        self.start_sum(last)()
        self.end_sum(this_sum, float(last[-1]))

    def agree(self, this_sum: Sum) -> None:
        """Has all workers begin a sum; they compare it, if they have to."""

        def compare() -> None:
            self.exchange(this_sum.call, b"")

        self.sums.agree(this_sum, compare)
        if not self.in_step:  # which is recorded
            self.recorder.note(this_sum.call)

    def end_sum(self, this_sum: Sum, flag: float) -> None:
        """Ends a sum, whose flag tells that a worker is at something else."""
        if flag:
            self.exchange(this_sum.call, b"")
        self.sums.follow(this_sum.call.key)

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
        row = torch.empty_like(rows[0])
        with self.named():
            self._wait(self.group._reduce_scatter_base(row, rows))
        return row

    @property
    def scatter_of_fsdp(self) -> Callable[[Any], Any] | None:
        """Returns what sums FSDP's gradients, `None` for its own way.

        Gloo's own reduce-scatter sends as much as an all-reduce.
        """
        return None if self._is_nccl else self._sum_of_rows

    def may_share_tensors(self, device_type: str) -> bool:
        """Returns whether PyTorch's own collectives work on such a device's
        tensors: gloo's end the process on those of GPUs."""
        return device_type == "cpu" or self._is_nccl

    def check_fsdp(self, device_type: str) -> None:
        """Raises if FSDP's collectives would end the process."""
        if self.may_share_tensors(device_type):
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

    def gather_flat(self, flat: torch.Tensor) -> torch.Tensor:
        """Concatenates the workers' flat tensors, which have equal lengths."""
        arrived = flat.new_empty(self.cluster.num_workers * flat.numel())
        with self.named():
            self._wait(self.group._allgather_base(arrived, flat))
        return arrived

    def gather_alike(self, tensors: Sequence[Any]) -> list[list[Any]]:
        packed = bytes_of(self._sendable(tensors))
        outputs = [
            torch.empty_like(packed) for _ in range(self.cluster.num_workers)
        ]
        if packed.numel():
            with self.named():
                self._wait(self.group.allgather([outputs], [packed]))
        return [tensors_of(output, tensors) for output in outputs]

    def broadcast_alike(self, tensors: Sequence[Any]) -> list[Any]:
        packed = bytes_of(self._sendable(tensors))
        if packed.numel():
            with self.named():
                self._wait(self.group.broadcast([packed]))
        return tensors_of(packed, tensors)

    def leave(self, reason: str, failed: bool) -> None:
        # What was sent last may not have arrived yet.
        self._beats.stop(reason, patience=0 if failed else PARTING)
        if failed or self._has_lost:
            for group in (self.group, self._frames):
                group.abort()
                # Never destroyed: its threads may wait forever, and destroying
                # it with them would abort the process.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Turns the error of a failed collective into one that says why."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, KerasDistError) or not hasattr(self, "_beats"):
                raise
            raise self._lost() from error

    def explain(self, error: BaseException) -> BaseException:
        is_known = isinstance(error, WorkerLostError)
        text = str(error).lower()
        is_sign = any(sign in text for sign in _SIGNS)
        return self._lost() if is_sign and not is_known else error

    def _lost(self) -> KerasDistError:
        self._has_lost = True
        if self._beats.apart is not None:
            return self._beats.apart
        who = self._beats.describe_lost() or (
            "every worker is alive, but not all of them took part within "
            f"{self._timeout:g} seconds"
        )
        return lost_error(self.cluster, who)


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns tensors of one dtype as a flat one to sum, and the flag."""
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    flat = torch.cat([*parts, parts[0].new_zeros(1)])
    return flat.to(_SUMMED_AS.get(flat.dtype, flat.dtype))


def _like(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Undoes `_flat` after the sum."""
    flat = flat.to(tensors[0].dtype)
    return split_as(flat, [tensor.shape for tensor in tensors])[:-1]


def check_alone() -> None:
    """See `Backend.check_alone`."""
    if not dist.is_available() or not dist.is_initialized():
        return
    number = dist.get_world_size()
    if number > 1:
        raise ClusterError(
            "No cluster was found, so each worker would train alone.\n"
            "Received: a process that is in a group of torch.distributed with "
            f"{number - 1} others. Expected: variables that say who the "
            "workers are. Start the workers with torchrun, `keras-dist run`, "
            "SLURM or MPI, set TF_CONFIG, or pass a `cluster_resolver`."
        )


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
    names = [name for _, *gpus in words for name in gpus]
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
