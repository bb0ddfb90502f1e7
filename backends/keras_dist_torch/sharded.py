"""The base of executors of variables and of slots in parts."""

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence

import keras
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from keras_dist.errors import UnsupportedModelError
from keras_dist.plugins import KeepsShards
from keras_dist.plugins import Plan
from keras_dist.plugins import RowShard
from keras_dist.plugins import ShardedVariable
from keras_dist.plugins import Storage
from keras_dist.plugins import adopt_slot
from keras_dist.plugins import inner_of
from keras_dist.plugins import is_of_keras
from keras_dist.plugins import trainable_variables
from keras_dist_torch.dtensor_internals import dispatcher
from keras_dist_torch.exact import Exactly
from keras_dist_torch.mesh import mesh_of
from keras_dist_torch.record import TorchRecord
from keras_dist_torch.replicas import TorchReplicaExecutor
from keras_dist_torch.shards import DTensorStorage
from keras_dist_torch.shards import ShardsScope
from keras_dist_torch.shards import is_large
from keras_dist_torch.shards import is_sharded
from keras_dist_torch.workers import TorchWorkers

# Attribute of an optimizer: how many variables it had when those that are slots
# were in parts.
_DIVIDED = "_keras_dist_divided"
# Words in errors of what `DTensor` can't compute.
_SIGNS = (
    *("DTensor", "Default process group", "sharded tensor"),
    *("tensor subclasses", "harding propagation"),
)
Views = Sequence[tuple[keras.Variable, DTensor]]


class ShardedExecutor(TorchReplicaExecutor, KeepsShards):
    """Runs replicas of workers that each keep parts of some variables."""

    workers: TorchWorkers

    def __init__(self, plan: Plan, workers: TorchWorkers) -> None:
        super().__init__(plan, workers)
        self._mesh = mesh_of(workers, self._primary.type)

    @property
    def compiling_problem(self) -> str:
        return "variables, or their optimizer's state, are in parts"

    def storage(self, variable: keras.Variable) -> Storage:
        if isinstance(variable, ShardedVariable) or self._divides(variable):
            return DTensorStorage(variable, self.plan, self._mesh, self.workers)
        return super().storage(variable)

    def _divides(self, variable: keras.Variable) -> bool:
        """Returns whether a variable without storage yet is to be sharded."""
        return TorchRecord.of(variable).is_marked

    def _overlapping(
        self, shares: Sequence[RowShard]
    ) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # most gradients are sent in parts

    def keep_together(
        self, variable: keras.Variable, reference: keras.Variable
    ) -> None:
        TorchRecord.of(variable).is_marked = is_large(variable)

    @contextlib.contextmanager
    def updating(self, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
        with self._updating_shards(optimizer, ()):
            yield

    @contextlib.contextmanager
    def _updating_shards(
        self, optimizer: keras.optimizers.Optimizer, views: Views
    ) -> Iterator[None]:
        """Has an optimizer update parts inside; views stand for variables."""
        self._divide(optimizer)
        own_code = (
            contextlib.nullcontext() if _is_of_keras(optimizer) else Exactly()
        )
        try:
            with ShardsScope(self.workers, views), _copies_allowed(), own_code:
                yield
        except (
            NotImplementedError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            text = str(error)
            is_sign = any(sign in text for sign in _SIGNS)
            if is_sign or isinstance(error, NotImplementedError):
                raise _not_sharded(optimizer, error) from error
            raise

    def _divide(self, optimizer: keras.Optimizer) -> None:
        """Divides slots that were made before the strategy had them."""
        slots = optimizer.variables
        if vars(optimizer).get(_DIVIDED) == len(slots):
            return
        for slot in slots:
            if is_large(slot) and not is_sharded(slot):
                TorchRecord.of(slot).is_marked = True
                adopt_slot(slot, trainable_variables(optimizer)[0])
                self.storage(slot).place()
        vars(optimizer)[_DIVIDED] = len(slots)

    @contextlib.contextmanager
    def readable_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> Iterator[None]:
        sharded = self._sharded_of(variables)
        if sharded:
            self.workers.barrier("all variables, to save or load them")
        try:
            for storage in sharded:
                storage.hold(self.plan.is_chief)
            yield
        finally:
            for storage in sharded:
                storage.release()

    @contextlib.contextmanager
    def written_by_chief(
        self, variables: Sequence[keras.Variable]
    ) -> Iterator[None]:
        with self.readable_by_chief(variables):
            yield
            for storage in self._sharded_of(variables):
                storage.take_chiefs()

    def _sharded_of(
        self, variables: Sequence[keras.Variable]
    ) -> list[DTensorStorage]:
        """Returns the storage of those variables that are sharded."""
        return [
            DTensorStorage(variable, self.plan, self._mesh, self.workers)
            for variable in variables
            if is_sharded(variable)
        ]


def _is_of_keras(optimizer: keras.Optimizer) -> bool:
    """Returns whether an update runs no code of a user's own."""
    classes = {type(optimizer), type(inner_of(optimizer))}
    for variable in trainable_variables(optimizer):
        constraint = variable.constraint
        if constraint is not None:
            classes.add(type(constraint))
    return all(map(is_of_keras, classes))


def _copies_allowed() -> contextlib.AbstractContextManager[None]:
    """Lets operations mix `DTensor`s and tensors, which are the same on all
    workers then."""
    # PyTorch's context ends with what it is by default.
    is_allowed = dispatcher._allow_implicit_replication
    return contextlib.nullcontext() if is_allowed else implicit_replication()


def _not_sharded(
    optimizer: keras.optimizers.Optimizer, error: Exception
) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"Optimizer '{optimizer.name}' of class {type(optimizer).__name__} "
        "can't update variables in parts, or a constraint of a variable "
        f"can't be computed on them. Received: {error} (from PyTorch). "
        "Expected: operations that DTensor has for parts along one axis, or "
        "'mirrored' in place of 'sharded'."
    )
