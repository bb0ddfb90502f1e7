"""The executor for variables in parts: one replica in each worker."""

import contextlib
import functools
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from keras_dist.core.context import replaced
from keras_dist.core.plan import Plan
from keras_dist.core.rows import Share
from keras_dist.errors import UnsupportedModelError
from keras_dist.internals import keras_internals
from keras_dist.internals.hooks import Hook
from keras_dist.internals.hooks import Hooks
from keras_dist.internals.hooks import as_hook
from keras_dist.internals.hooks import seen_warnings
from keras_dist.internals.keras_optimizers import WITH_APPLY
from keras_dist.internals.keras_random import lend_global_seed
from keras_dist.internals.private_names import private
from keras_dist.plugin.front_end import HOOKS
from keras_dist.plugin.home import Home
from keras_dist.plugin.places import Places
from keras_dist.plugin.powers import KeepsParts
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.replica import ReplicaGroup
from keras_dist.plugin.replica import named
from keras_dist.replica.adoption import adopt
from keras_dist.replica.state import current_replica
from keras_dist.replica.state import outside_replicas
from keras_dist.replica.variables import ShardedVariable
from keras_dist_torch.chunks import may_cut
from keras_dist_torch.direct_replica import DirectReplica
from keras_dist_torch.direct_replica import in_parts
from keras_dist_torch.draws import Draws
from keras_dist_torch.draws import ReplicaDraws
from keras_dist_torch.draws import States
from keras_dist_torch.fsdp_internals import reset
from keras_dist_torch.keras_internals import ParallelOptimizer
from keras_dist_torch.keras_internals import own_variables
from keras_dist_torch.mesh import mesh_of
from keras_dist_torch.parts import DTensorHome
from keras_dist_torch.parts import are_in_parts
from keras_dist_torch.parts import as_local_parts
from keras_dist_torch.parts import as_parts
from keras_dist_torch.parts import hold
from keras_dist_torch.parts import is_to_split
from keras_dist_torch.parts import mark_slot
from keras_dist_torch.parts import marked_weight
from keras_dist_torch.parts import reads_parts
from keras_dist_torch.parts import release
from keras_dist_torch.parts import stored
from keras_dist_torch.replicas import TorchReplicaExecutor
from keras_dist_torch.units import is_live
from keras_dist_torch.units import new_layers
from keras_dist_torch.units import shard_layers
from keras_dist_torch.workers import TorchWorkers

dispatch = private("torch.distributed.tensor._dispatch")

T = TypeVar("T")


@as_hook
def _hook_tracking(original: Any, self: Any, /, *args: Any) -> None:
    """Keeps Keras from gathering variables to register them with PyTorch."""
    if not is_live(self):
        with as_parts():
            original(self, *args)


@as_hook
def _hook_assignment(original: Any, self: Any, value: Any) -> None:
    """Gathers what an optimizer assigns to a variable that is not in parts."""
    is_ours = "distribute_strategy" in vars(self)
    if is_ours and isinstance(value, DTensor):
        value = value.full_tensor()
    original(self, value)


@as_hook
def _hook_update(
    original: Any,
    self: Any,
    grads: Sequence[Any],
    trainable_variables: Sequence[keras.Variable],
    learning_rate: Any,
) -> None:
    """Has an optimizer compute with this worker's parts themselves, without
    what `DTensor` does for each operation."""
    if not (
        reads_parts()
        and may_cut(self)
        and all(map(_is_alike, grads, trainable_variables))
        and _has_slots_in_parts(self, trainable_variables)
    ):
        original(self, grads, trainable_variables, learning_rate)
        return
    own = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    with as_local_parts():
        original(self, own, trainable_variables, learning_rate)


def _is_alike(gradient: Any, variable: keras.Variable) -> bool:
    """Returns whether a gradient is in parts as its variable is, or neither."""
    kept = stored(variable)
    if isinstance(kept, DTensor) and isinstance(gradient, DTensor):
        return bool(kept.placements == gradient.placements)
    return kept is None and not isinstance(gradient, DTensor)


def _has_slots_in_parts(
    optimizer: Any, variables: Sequence[keras.Variable]
) -> bool:
    """Returns whether no slot is whole whose variable may be in parts."""
    shapes = {each.shape for each in variables if stored(each) is not None}
    return not any(
        each.shape in shapes and stored(each) is None
        for each in optimizer.variables
    )


@as_hook
def _hook_apply(
    original: Any, self: Any, grads: Any, trainable_variables: Any = None
) -> None:
    """Refuses updates outside of steps, which would change copies only."""
    trained = list(trainable_variables or ())
    is_outside = current_replica() is None and not reads_parts()
    if is_outside and are_in_parts([*self.variables, *trained]):
        raise UnsupportedModelError(
            f"Optimizer '{self.name}' was called outside of `fit`, "
            "`train_on_batch`, a `train_step` and `strategy.run`, for "
            "variables in parts. Expected: an update in a model's "
            "`train_step` or in a replica function, or variables='mirrored'."
        )
    original(self, grads, trainable_variables and trained)


class _Called(threading.local):
    def __init__(self) -> None:
        # Takes the models that a replica function calls.
        self.prepare: Callable[[keras.Model], None] | None = None


_called = _Called()


@as_hook
def _hook_call(original: Any, layer: Any, /, *args: Any, **kw: Any) -> Any:
    """Prepares a model that a replica function calls itself."""
    prepare = _called.prepare if isinstance(layer, keras.Model) else None
    if prepare is not None and keras_internals.innermost_layer() is None:
        prepare(layer)
    return original(layer, *args, **kw)


def _see(text: str) -> bool:
    # It is right: such a variable is the same on all workers.
    return reads_parts() and "non-scalar tensor with numel=1" in text


def _table() -> Iterator[Hook]:
    yield from HOOKS.rows()
    why = "nothing is gathered to register it with PyTorch"
    for name in ("_track_variables", "_post_track_variable"):
        yield Hook(keras.Layer, name, _hook_tracking, why)
    why = "what is assigned to a variable that is whole is gathered"
    yield Hook(keras.Variable, "_direct_assign", _hook_assignment, why)
    why = "updates outside of steps, which would change copies, are refused"
    for cls in WITH_APPLY:
        yield Hook(cls, "apply", _hook_apply, why)
    why = "an optimizer computes with a worker's parts themselves"
    name = "_backend_update_step"
    yield Hook(ParallelOptimizer, name, _hook_update, why)
    why = "a worker's copy of a number among parts is not warned of"
    yield Hook(dispatch, "warnings", seen_warnings(_see), why)
    why = "a model's layers are in parts before a replica calls it"
    yield Hook(keras.Layer, "__call__", _hook_call, why)


class TorchDirectExecutor(TorchReplicaExecutor, KeepsParts):
    """Runs one replica a worker, on variables in parts."""

    hooks = Hooks(_table)
    workers: TorchWorkers
    # A plain model would update copies.
    shares_layers = False

    def __init__(self, plan: Plan, workers: TorchWorkers) -> None:
        super().__init__(plan, workers)
        workers.check_fsdp(self._home.type)
        self._mesh = mesh_of(workers, self._home.type)
        # FSDP's hooks, as they are.
        self._step = torch._dynamo.disable(self._run_step)

    def home(self, variable: keras.Variable) -> Home:
        is_sharded = isinstance(variable, ShardedVariable)
        if is_sharded or is_to_split(variable):
            return DTensorHome(variable, self.plan, self._mesh, self.workers)
        return super().home(variable)

    def keep_together(
        self, variable: keras.Variable, reference: keras.Variable
    ) -> None:
        mark_slot(variable, reference)

    def prepare(self, model: keras.Model) -> None:
        super().prepare(model)
        if model.built:
            self._split_weights(model)
            shard_layers(model, self._mesh, self.workers.scatter_of_fsdp)

    def _split_weights(self, model: keras.Model) -> None:
        """Divides large weights that were not trained when they were made."""
        for layer in new_layers(model):
            for variable in own_variables(layer):
                if marked_weight(variable):
                    adopt(variable)
                    self.home(variable).settle()

    def recover(self, model: keras.Model) -> None:
        reset(model)

    def call(self, fn: Callable[[Replica], T]) -> list[T]:
        called: list[keras.Model] = []

        def prepare(model: keras.Model) -> None:
            called.append(model)
            if new_layers(model):
                with outside_replicas():
                    self.prepare(model)

        try:
            # All workers call the same models, and share their layers then.
            # Compiled functions run as they are, with FSDP's hooks.
            plainly = torch.compiler.set_stance("force_eager")
            with replaced(_called, prepare=prepare), plainly:
                return super().call(fn)
        except BaseException:
            for model in called:
                self.recover(model)
            raise

    def _overlapping(
        self, shares: Sequence[Share]
    ) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # FSDP sends gradients

    def _play(
        self,
        fn: Callable[..., T],
        members: Sequence[tuple[Any, ...]],
        group: ReplicaGroup,
        overlap: Any = None,
        places: Places | None = None,
        may_repeat: bool = False,
    ) -> list[T]:
        ((_, share, *args),) = members
        replica = DirectReplica(share, group)
        draws = functools.partial(
            Draws, 1, places=places, may_repeat=may_repeat
        )
        result: T = self._step(fn, replica, draws, args)
        return [result]

    def _run_step(
        self,
        fn: Callable[..., T],
        replica: DirectReplica,
        draws: Callable[[States], Draws],
        args: list[Any],
    ) -> T:
        place = named(replica.id, self.plan.num_replicas)
        lend_global_seed()
        try:
            with place, self._own_randomness() as states:
                made = draws(states)
                replica.draws = ReplicaDraws(replica, made, self._home)
                result = self._on_device(fn, replica, *args)
                made.end()
            return result
        finally:
            replica.close()

    def sum_gradients(
        self,
        replica: Replica,
        gradients: Sequence[Sequence[Any]],
        weights: Sequence[Any],
        variables: Sequence[keras.Variable],
    ) -> list[Any]:
        assert isinstance(replica, DirectReplica)
        self.workers.check()  # FSDP does not, and gradients are used next
        ((given,), (weight,)) = gradients, weights
        own = [in_parts(gradient) for gradient in given]
        replica.trains(variables)
        # Gradients that no backward pass has computed have no weight yet.
        factor = 1.0 if replica.has_gradients else weight
        places = [
            place
            for place, gradient in enumerate(own)
            if not isinstance(gradient, DTensor)
        ]
        sums = self._summed([own[i] for i in places], places, variables, factor)
        found = list(own)
        for place, total in zip(places, sums, strict=True):
            found[place] = self._in_parts(total, variables[place])
        return found

    def carries(self, variables: Sequence[keras.Variable]) -> bool:
        return False  # FSDP sends most gradients

    def _summed(
        self,
        own: list[Any],
        places: list[int],
        variables: Sequence[keras.Variable],
        factor: float,
    ) -> list[Any]:
        """Sums gradients over workers, `None` where no worker has one."""
        if not own:
            return []
        flags = torch.tensor([float(g is not None) for g in own])
        filled = [
            torch.zeros(tuple(variables[i].shape), device=self._home)
            if gradient is None
            else gradient * factor
            for i, gradient in zip(places, own, strict=True)
        ]
        *sums, counts = self.workers.sum([*filled, flags.to(self._home)])
        return [
            total if is_present else None
            for total, is_present in zip(
                sums, self._are_present(own, counts), strict=True
            )
        ]

    def _are_present(self, own: list[Any], counts: torch.Tensor) -> list[bool]:
        """Tells which gradients any worker has, of these of its own."""
        return [count > 0 for count in counts.tolist()]

    def _in_parts(self, total: Any, variable: keras.Variable) -> Any:
        home = self.home(variable)
        if total is None or not isinstance(home, DTensorHome):
            return total
        return home.split(total).detach()

    @contextlib.contextmanager
    def updating(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        try:
            # What is no `DTensor` is the same on all workers.
            with as_parts(), implicit_replication():
                yield
        except NotImplementedError as error:
            raise _not_in_parts(optimizer, error) from error

    @contextlib.contextmanager
    def readable_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> Iterator[None]:
        chosen = [each for each in variables if are_in_parts([each])]
        if chosen:
            self.workers.meet("all variables, to save or load them")
        with _held(chosen, self.plan.is_chief, torch.device("cpu")):
            yield

    @contextlib.contextmanager
    def written_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> Iterator[None]:
        chosen = [each for each in variables if are_in_parts([each])]
        with self.readable_by_chief(chosen):
            yield
            for variable in chosen:
                home = self.home(variable)
                assert isinstance(home, DTensorHome)
                home.take_chiefs(release(variable))


@contextlib.contextmanager
def _held(
    variables: Sequence[keras.Variable],
    is_held: bool = True,
    device: torch.device | None = None,
) -> Iterator[None]:
    """Gathers variables, one after the other, and holds them inside."""
    try:
        for variable in variables:
            hold(variable, is_held, device)
        yield
    finally:
        for variable in variables:
            release(variable)


def _not_in_parts(
    optimizer: keras.optimizers.Optimizer, error: Exception
) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Optimizer '{optimizer.name}' of class {type(optimizer).__name__} "
        "can't update variables in parts, or a constraint of a variable "
        f"can't be computed on them. PyTorch says: {error}. Expected: "
        "operations that DTensor has, or variables='mirrored'."
    )
