"""Backend and Executor: what a framework plugin implements.

A plugin is a package that registers a `Backend` subclass under the entry-point
group `keras_dist.backends`, with the name that `keras.backend.backend()`
returns. keras_dist loads it when a device or a strategy is first asked for.
"""

import contextlib
import functools
from abc import ABC
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist.cluster import Cluster
from keras_dist.compilation import Compiler
from keras_dist.components import Component
from keras_dist.components import HeldComponent
from keras_dist.device import Device
from keras_dist.errors import BackendNotFoundError
from keras_dist.errors import ClusterError
from keras_dist.inputs.communication import CommunicationOptions
from keras_dist.owners import Owners
from keras_dist.plan import Plan
from keras_dist.reduction import ReduceOp
from keras_dist.reduction import combine
from keras_dist.training.replica import ReplicaRunner
from keras_dist.values import PerReplica
from keras_dist.workers import Workers
from keras_dist.workers import total_of

ENTRY_POINT_GROUP = "keras_dist.backends"


class Executor(ABC):
    """Carries out one `Plan` with one framework.

    Args:
        plan: The `Plan` it is bound to.
        workers: The `Workers` of its cluster, or `None` without one.

    Attributes:
        owners: The `Owners` of variables that have one copy only.
    """

    # What compiles functions for the plan, where the framework can.
    compiler: Compiler | None = None

    def __init__(self, plan: Plan, workers: Workers | None = None) -> None:
        self.plan = plan
        self.workers = workers
        self.owners = Owners(plan.variable_devices)

    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Entered wherever variables are made under the strategy."""
        return contextlib.nullcontext()

    def execution_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around `fit` and its relatives on a distributed model."""
        return contextlib.nullcontext()

    def default_device(self) -> Any:
        """What the framework calls this thread's default device."""
        return None

    @abstractmethod
    def place(self, variable: keras.Variable) -> None:
        """Puts a variable's value where the plan says; idempotent and cheap.

        A variable with no value yet is left alone.
        """

    @abstractmethod
    def devices_of(self, variable: keras.Variable) -> tuple[Device, ...]:
        """The devices that hold a copy of the variable, primary first."""

    @property
    def replicas(self) -> ReplicaRunner | None:
        """What runs several replicas; `None` where there is only one."""
        return None

    @property
    def num_components(self) -> int:
        """Components of a per-replica value: those of the local replicas.

        A program that all workers run together may have those of all.
        """
        return self.plan.num_local_replicas

    @abstractmethod
    def put(self, value: Any, device: Device) -> Any:
        """A tensor on a device.

        Args:
            value: Tensor, NumPy array, number, or nest of numbers. It may
                share memory with the result.
            device: `Device`.
        """

    def per_replica(self, values: Sequence[Any]) -> Any:
        """A `PerReplica` of components, as the framework knows it best."""
        return PerReplica(values)

    def check_arguments(self, nest: Any) -> None:
        """Refuses arguments that no replica function can be called with.

        Raises:
            UnsupportedModelError: If there is one.
        """
        return  # TensorFlow can't convert a function of nothing

    def bring(self, value: Any, index: int) -> Any:
        """An argument as replica `index` can use it, moved if need be."""
        return value

    def mirror(self, value: Any) -> Any:
        """A tensor where variables are, so that the two can be combined.

        Variables may keep it: it shares no memory with `value`.
        """
        return self.put(value, self.plan.primary)

    def device_of(self, tensor: Any) -> Device:
        """Where a tensor is; the primary device where that is not known."""
        return self.plan.primary

    @abstractmethod
    def copy_of(self, variable: keras.Variable, index: int) -> Any:
        """The copy of a mirrored variable that replica `index` reads."""

    def component(
        self, variable: keras.Variable, index: int, value: Callable[[], Any]
    ) -> Component:
        """Makes room for a replica's own value of a variable.

        Args:
            variable: A `keras.Variable`.
            index: Integer, the replica's.
            value: Callable that gives the value it starts with.
        """
        return HeldComponent(value())

    def combine(self, op: ReduceOp, values: Sequence[Any]) -> Any:
        """Combines tensors of one shape element by element, of all workers.

        Args:
            op: `ReduceOp`.
            values: Sequence with each local replica's tensor or number.

        Returns:
            Tensor where variables are.

        Raises:
            ValueError: If shapes differ.
        """
        here = [self.put(value, self.plan.primary) for value in values]
        if self.workers is None:
            return self.mirror(combine(op, here))
        own = combine(total_of(op), here)
        count = self.plan.num_replicas
        return self.mirror(self.workers.combine(op, own, count))

    def combine_all(
        self, op: ReduceOp, values: Sequence[Sequence[Any]]
    ) -> list[Any]:
        """`combine` of several values, in as few collectives as can be.

        Args:
            op: `ReduceOp`.
            values: Sequence with, for each value, what `combine` takes.
        """
        if self.workers is None or op not in (ReduceOp.SUM, ReduceOp.MEAN):
            return [self.combine(op, each) for each in values]
        own = [
            combine(
                ReduceOp.SUM, [self.put(v, self.plan.primary) for v in each]
            )
            for each in values
        ]
        totals = self.workers.sum(own)
        if op is ReduceOp.MEAN:
            count = self.plan.num_replicas
            totals = [ops.true_divide(total, count) for total in totals]
        return [self.mirror(total) for total in totals]

    def combine_whole(self, op: ReduceOp, value: Any) -> Any:
        """`combine`, of a per-replica value that is one thing to the framework.

        Args:
            op: `ReduceOp`.
            value: Anything.

        Returns:
            Tensor where variables are; `None` for any other value.
        """
        return None

    def concatenate(self, values: Sequence[Any], axis: int) -> Any:
        """Joins tensors of all replicas, on the primary device.

        Args:
            values: Sequence of each local replica's, which fit together.
            axis: Integer, not negative.
        """
        here = [self.put(value, self.plan.primary) for value in values]
        own = ops.concatenate(here, axis=axis)
        if self.workers is None:
            return own
        return self.workers.concatenate(own, axis)

    def check_equal(
        self, values: Sequence[Any], error: Callable[[], Exception]
    ) -> None:
        """Raises `error()` unless all values are equal, up to rounding.

        Args:
            values: Sequence of each local replica's tensor. Those of other
                workers are looked at too.
            error: Callable that makes the exception.
        """
        everyone = list(values)
        if self.workers is not None:
            tensor = ops.convert_to_tensor(values[0])
            everyone += [each[0] for each in self.workers.gather([tensor])]
        first, *others = [ops.convert_to_numpy(value) for value in everyone]
        for other in others:
            if not np.allclose(first, other, rtol=1e-4, equal_nan=True):
                raise error()

    @abstractmethod
    def bind(self, model: keras.Model) -> Mapping[str, Callable[..., Any]]:
        """Methods that replace the model's own, on this instance only.

        Args:
            model: A `keras.Model`, not necessarily built or compiled.

        Returns:
            Dict from attribute name to callable. The class still holds the
            originals.
        """

    def prepare(self, model: keras.Model) -> None:
        """Called before the model runs, with its variables in place."""

    def recover(self, model: keras.Model) -> None:
        """Called when `fit` or a relative failed, before the error leaves."""

    def release(self, model: keras.Model) -> None:
        """Called when `fit` or a relative is over, however it ended."""


class Backend(ABC):
    """One framework: its devices, and executors for plans on them."""

    @abstractmethod
    def list_devices(self) -> Sequence[Device]:
        """All devices of this worker, accelerators and CPUs."""

    @abstractmethod
    def set_virtual_devices(self, num_devices: int, device_type: str) -> None:
        """Makes one physical device appear as several.

        Args:
            num_devices: Integer, at least 1.
            device_type: String, `"cpu"`.

        Raises:
            VirtualDevicesError: If the framework has started already.
            DeviceError: If that type can't be split.
        """

    def join(self, cluster: Cluster, options: CommunicationOptions) -> None:
        """Makes this process a worker of a cluster, for as long as it lives.

        Called before devices are listed. Executors of plans with a cluster
        use what it made. Joining the same cluster again does nothing.

        Args:
            cluster: The `Cluster`.
            options: `CommunicationOptions`.

        Raises:
            ClusterError: If it belongs to another cluster already, if an
                address is taken or unknown, or if options don't fit.
            WorkerLostError: If not all workers came in time.
            RuntimeError: If the framework has started already.
        """
        raise ClusterError(
            f"The backend '{keras.backend.backend()}' trains on one worker "
            f"only. Received: a cluster of {cluster.num_workers}. Choose "
            "another backend with KERAS_BACKEND."
        )

    @abstractmethod
    def executor(self, plan: Plan) -> Executor:
        """An executor bound to the plan."""

    def random_state(self) -> str:
        """The state of the framework's global randomness, where it has any.

        A framework that draws its seed when it is first needed has one from
        now on.
        """
        return ""

    def set_random_state(self, state: str) -> None:
        """Goes back to what `random_state` returned, on any worker."""

    def compiler(self) -> Compiler | None:
        """What compiles functions in no strategy, where the framework can."""
        return None

    def print(
        self,
        values: Sequence[Any],
        sep: str,
        end: str,
        replica: Any,
    ) -> None:
        """Prints values; where a function is traced, each time it runs.

        Args:
            values: Sequence of tensors, of anything else, or of nests.
            sep: String between them.
            end: String after the last one.
            replica: The replica's index, an integer or tensor, for `replica
                0: ` and so on in front; `None` if there is only one.
        """
        prefix = "" if replica is None else f"replica {int(replica)}: "
        # In one piece, because threads may print at the same time.
        text = sep.join(map(str, values))
        print(f"{prefix}{text}{end}", end="")

    def plan_of_native(self, strategy: Any) -> Plan:
        """The plan of a strategy of the framework's own.

        Args:
            strategy: What the framework calls a strategy.

        Raises:
            TypeError: If it is nothing that can be taken over.
        """
        raise TypeError(
            f"The backend '{keras.backend.backend()}' has no strategies of its "
            f"own to take over. Received: {strategy!r} of type "
            f"{type(strategy).__name__}. Make one of keras_dist's, or choose "
            "another backend with KERAS_BACKEND."
        )


_overrides: list[Backend] = []


@contextlib.contextmanager
def override_backend(backend: Backend) -> Iterator[Backend]:
    """Serves `backend` in place of the installed plugin; for tests."""
    _overrides.append(backend)
    try:
        yield backend
    finally:
        _overrides.remove(backend)


def get_backend() -> Backend:
    """The plugin of the Keras backend in use.

    Raises:
        BackendNotFoundError: If none is installed, naming the extra to add.
    """
    return _overrides[-1] if _overrides else _load(keras.backend.backend())


@functools.cache
def _load(name: str) -> Backend:
    found = {e.name: e for e in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in found:
        raise BackendNotFoundError(
            f"keras_dist has no plugin for the Keras backend '{name}'. "
            f"Installed: {sorted(found) or 'none'}. Choose one of them with "
            "the environment variable KERAS_BACKEND, or install a plugin "
            f"that registers '{name}' under '{ENTRY_POINT_GROUP}'."
        )
    try:
        backend: Backend = found[name].load()()
    except ModuleNotFoundError as error:
        raise BackendNotFoundError(
            f"The keras_dist plugin for '{name}' needs the module "
            f"'{error.name}', which is not installed. Install it with "
            f"`pip install 'keras-dist[{name}]'`."
        ) from error
    return backend
