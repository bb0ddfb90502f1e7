"""The executor for several replicas: threads under Keras' own trainer."""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras
import torch

from keras_dist.errors import DeviceError
from keras_dist.errors import UnsupportedModelError
from keras_dist.plugins import WHOLE
from keras_dist.plugins import Device
from keras_dist.plugins import LockstepThreads
from keras_dist.plugins import MisjudgedDraws
from keras_dist.plugins import Owners
from keras_dist.plugins import OwnRows
from keras_dist.plugins import Places
from keras_dist.plugins import Plan
from keras_dist.plugins import Replica
from keras_dist.plugins import ReplicaGroup
from keras_dist.plugins import Round
from keras_dist.plugins import RowShard
from keras_dist.plugins import StepRunner
from keras_dist.plugins import UnequalLengths
from keras_dist.plugins import bounds
from keras_dist.plugins import group_of
from keras_dist.plugins import inherit_thread_state
from keras_dist.plugins import ranges
from keras_dist.plugins import thread_state
from keras_dist_torch import prefetch
from keras_dist_torch import transfers
from keras_dist_torch.buckets import Overlap
from keras_dist_torch.buckets import carries_numbers
from keras_dist_torch.compiled_training import CompiledTraining
from keras_dist_torch.draws import Draws
from keras_dist_torch.draws import States
from keras_dist_torch.draws import seeded_apart
from keras_dist_torch.gradients import weighted_sum
from keras_dist_torch.keras_internals import ASKS_TO_COMPILE
from keras_dist_torch.keras_internals import TorchModuleWrapper
from keras_dist_torch.one_device import TorchExecutor
from keras_dist_torch.one_device import TorchStorage
from keras_dist_torch.one_device import keras_device
from keras_dist_torch.one_device import torch_device
from keras_dist_torch.replica import Run
from keras_dist_torch.replica import TorchReplica
from keras_dist_torch.replica import cut
from keras_dist_torch.replica import lengths_of
from keras_dist_torch.transfers import Transfers
from keras_dist_torch.workers import TorchWorkers

T = TypeVar("T")


class TorchReplicaExecutor(TorchExecutor, StepRunner):
    """Runs steps on replicas; the update happens once, on the primary."""

    workers: TorchWorkers | None
    looks_at_draws = True

    def __init__(self, plan: Plan, workers: TorchWorkers | None = None) -> None:
        super().__init__(plan, workers)
        self._primary = torch_device(plan.primary)
        self._devices = [torch_device(device) for device in plan.devices]
        self._is_one_device = {self._primary, *self._devices} == {self._primary}
        self._are_away = [
            transfers.are_apart(device, plan.primary) for device in plan.devices
        ]
        self._open: set[Transfers] = set()
        self._unequal = UnequalLengths()
        # `torch.compile` must not trace threads.
        self._run_threads = torch._dynamo.disable(
            LockstepThreads(capture_thread).run
        )

    @property
    def device(self) -> torch.device:
        """The device of this worker's first replica."""
        return self._devices[0]

    @property
    def compiling_problem(self) -> str:
        """Why no step is compiled, if so."""
        if self.workers is None or self.plan.num_local_replicas > 1:
            return (
                "several replicas in one process take turns. Start a process "
                "for each device, for instance with `keras-dist run`"
            )
        if any(self._are_away):
            return "its variables are on another device than its replica"
        return ""

    def bind(self, model: keras.Model) -> Mapping[str, Callable[..., Any]]:
        # Keras would have `torch.compile` trace what is around the replicas.
        return dict.fromkeys(ASKS_TO_COMPILE, lambda: False)

    def compiled_step(
        self,
        name: str,
        run: Callable[[keras.Model, Any], Any],
        is_of_keras: Callable[[keras.Model], bool],
    ) -> Callable[[keras.Model, Any], Any]:
        if name != "train_step":
            return run
        return CompiledTraining(self, run, is_of_keras)

    def prepare(self, model: keras.Model) -> None:
        for layer in model._flatten_layers():
            if isinstance(layer, TorchModuleWrapper):
                raise UnsupportedModelError(
                    f"Layer '{layer.name}' wraps a torch.nn.Module, whose "
                    "parameters replicas would share. Expected: Keras "
                    "layers. Use one device, or write this layer with Keras "
                    "layers."
                )

    def run(
        self,
        fn: Callable[[Replica, Any], T],
        batch: object,
        *,
        places: Places | None = None,
    ) -> list[T]:
        lengths = lengths_of(batch)
        alike = len(set(lengths)) == 1
        if not alike and self.plan.num_replicas > 1:
            self._unequal.tell(lengths, on_each=False)
        edges = self._edges(lengths[0], alike)
        note = ""
        if places is not None and places.shift(edges):
            note = _SHIFTED.format(edges[1])
            if self.workers is not None:
                batch = self.workers.whole_batch(
                    batch,
                    lambda total: self._local(ranges(self._edges(total, True))),
                )
        group = group_of(self.plan, self.workers, edges)
        local = self._local(ranges(edges))
        members = [(index, rows) for index, rows in enumerate(local) if rows]
        # A worker without rows runs one replica, with weight 0.
        members = members or [(0, range(0))]

        def part(index: int, rows: range) -> Any:
            taken = (
                slice(rows.start, max(rows.stop, 1)) if alike else slice(None)
            )
            return cut(batch, taken, self._devices[index])

        shares = [
            RowShard(len(rows), lengths[0], rows.start) for _, rows in members
        ]

        def once(may_repeat: bool) -> list[T]:
            if places is not None:
                # Only a step that looks at draws needs them.
                by_replica = ranges(edges) if places.is_open else []
                places.begin([max(len(rows), 1) for rows in by_replica])
            # Gradients must not leave in a step that may begin anew.
            overlapping = (
                contextlib.nullcontext()
                if may_repeat
                else self._overlapping(shares)
            )
            with overlapping as overlap:
                parts = [
                    (index, share, part(index, rows))
                    for (index, rows), share in zip(
                        members, shares, strict=True
                    )
                ]
                return self._play(fn, parts, group, overlap, places, may_repeat)

        if places is None or not places.is_open:
            return once(False)
        try:
            with _generators_kept_by(MisjudgedDraws), _noted(note):
                return once(True)
        except MisjudgedDraws:
            places.recover()
            with _noted(note):
                return once(False)

    def _overlapping(
        self, shares: Sequence[RowShard]
    ) -> contextlib.AbstractContextManager[Overlap | None]:
        """Returns a context in which gradients leave when they are there."""
        if self.workers is None:
            return contextlib.nullcontext()
        weights = [share.weight for share in shares]
        return Overlap(self.workers, self._primary, weights)

    def _prefetch(self) -> contextlib.AbstractContextManager[None]:
        # Each replica's rows are sent when its step begins.
        is_gpu = any(device.type == "cuda" for device in self._devices)
        return prefetch.from_host() if is_gpu else contextlib.nullcontext()

    def own_rows_of(self, model: keras.Model) -> type[OwnRows] | None:
        return OwnRows

    def rows_in_fit(self, batch: object) -> list[range]:
        lengths = lengths_of(batch)
        return ranges(self._edges(lengths[0], len(set(lengths)) == 1))

    def _local(self, shares: Sequence[range]) -> Sequence[range]:
        first = self.plan.first_replica
        return shares[first : first + self.plan.num_local_replicas]

    def _edges(self, rows: int, alike: bool) -> list[int]:
        """Returns replicas' first rows, and at the end `rows`."""
        edges = bounds(rows, self.plan.num_replicas) if alike else [0]
        return edges + [rows] * (self.plan.num_replicas + 1 - len(edges))

    def _own_randomness(self) -> contextlib.AbstractContextManager[States]:
        if self.plan.num_replicas == 1:
            return contextlib.nullcontext([])
        first = self.plan.first_replica
        return seeded_apart(self._devices, self.workers, first)

    def call(self, fn: Callable[[Replica], T]) -> list[T]:
        group = ReplicaGroup(self.workers, self.plan.first_replica)
        members = [(i, WHOLE) for i in range(self.plan.num_local_replicas)]
        return self._play(fn, members, group)

    def _play(
        self,
        fn: Callable[..., T],
        members: Sequence[tuple[Any, ...]],
        group: ReplicaGroup,
        overlap: Overlap | None = None,
        places: Places | None = None,
        may_repeat: bool = False,
    ) -> list[T]:
        """Runs replicas: their index, their share, and arguments of `fn`."""
        round_ = Round(len(members))
        moving = self._transfers([index for index, *_ in members])
        with moving as moved, self._own_randomness() as states:
            draws = Draws(len(members), states, places, may_repeat)
            run = Run(
                round_,
                group,
                self._primary,
                len(members) == 1,
                self._is_one_device,
                moved,
                overlap,
                draws,
                None if self.workers is None else self.workers.look,
            )
            fns = []
            for position, (index, share, *args) in enumerate(members):
                device = self._devices[index]
                replica = TorchReplica(index, share, position, device, run)
                fns.append(
                    functools.partial(self._on_device, fn, replica, *args)
                )
            results: list[T] = self._run_threads(round_, fns)
            draws.end()
        return results

    @contextlib.contextmanager
    def _transfers(self, members: Sequence[int]) -> Iterator[Transfers | None]:
        """Opens the transfers of a round, `None` if devices share memory."""
        if not any(self._are_away):
            yield None
            return
        moved = Transfers(
            self._primary,
            [
                self._devices[index] if self._are_away[index] else None
                for index in members
            ],
        )
        self._open.add(moved)
        try:
            yield moved
        finally:
            self._open.discard(moved)
            moved.close(may_pack=not self._open)

    def _on_device(
        self, fn: Callable[..., T], replica: Replica, *args: Any
    ) -> T:
        with keras_device(self.plan.devices[replica.index]):
            return fn(replica, *args)

    def building(self) -> Any:
        return self.creation_scope()

    def sum_gradients(
        self,
        replica: Replica,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
        numbers: Sequence[Any] = (),
    ) -> list[Any]:
        here = self.arrived(replica, gradients)
        if self.workers is None:
            return weighted_sum(here, weights, self._primary)
        assert isinstance(replica, TorchReplica)
        overlap = replica.overlap or Overlap(self.workers, self._primary)
        return overlap.sum(gradients, here, weights, variables, numbers)

    def arrived(
        self, replica: Replica, gradients: Sequence[Sequence[Any]]
    ) -> Sequence[Sequence[Any]]:
        """Returns replicas' gradients in the memory where they are summed."""
        assert isinstance(replica, TorchReplica)
        replica.draws.of_round.may_repeat = False
        if replica.moved is None:
            return gradients
        return replica.moved.bring_back(gradients)

    def carries(self, variables: Sequence[keras.Variable]) -> bool:
        workers = self.workers
        if workers is None or workers.options.dtype is not None:
            return False
        return carries_numbers(variables)


# The note on errors in such a step.
_SHIFTED = (
    "(in a step that keras_dist split unevenly, with {} rows for the first "
    "replica, to see which axes have rows; any number of rows may come)"
)


@contextlib.contextmanager
def _generators_kept_by(error: type[BaseException]) -> Iterator[None]:
    """Restores PyTorch's own generators if such an error ends the context."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    states = [generator.get_state() for generator in generators]
    try:
        yield
    except error:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        raise


@contextlib.contextmanager
def _noted(note: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if note:
            error.add_note(note)
        raise


class TorchCentralStorage(TorchStorage):
    """The storage of a single copy, on one of the parameter devices."""

    kind = "central"

    @property
    def devices(self) -> tuple[Device, ...]:
        return (self._device,)


class TorchCentralExecutor(TorchReplicaExecutor):
    """Replicas that read a single copy of each variable."""

    def __init__(self, plan: Plan, workers: TorchWorkers | None = None) -> None:
        super().__init__(plan, workers)
        # One update would mix variables on several memories.
        if len(set(map(torch_device, plan.variable_devices))) > 1:
            names = ", ".join(str(device) for device in plan.variable_devices)
            raise DeviceError(
                "On PyTorch, all variables that have one copy must be in one "
                "memory, because an optimizer updates them together. "
                f"Received: parameter_device={names}. Expected: one GPU, or "
                "CPU devices."
            )
        self._owners = Owners(plan.variable_devices)

    def initial_values_device(self) -> torch.device:
        """Returns the device whose generators draw initial values.

        It is that of the first replica: another kind of device draws other
        numbers from the same seed.
        """
        return self._devices[0]

    def storage(self, variable: keras.Variable) -> TorchCentralStorage:
        return TorchCentralStorage(
            variable, self.plan, self._owners.of(variable)
        )

    def keep_together(
        self, variable: keras.Variable, reference: keras.Variable
    ) -> None:
        self._owners.keep_together(variable, reference)


def capture_thread() -> Callable[[], None]:
    """Captures this thread's state in a function that sets it in another."""
    state = thread_state()
    gradients = torch.is_grad_enabled()
    types = {"cpu"}
    if torch.accelerator.is_available():
        types.add(torch.accelerator.current_accelerator().type)
    autocast = [
        (
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
        )
        for device_type in sorted(types)
    ]

    def inherit() -> None:
        inherit_thread_state(state)
        torch.set_grad_enabled(gradients)
        for device_type, enabled, dtype in autocast:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)

    return inherit
