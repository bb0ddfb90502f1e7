"""Backend: what a framework plugin implements, beside its `Executor`s.

A plugin is a package that registers a `Backend` subclass under the entry-point
group `keras_dist.backends`, with the name that `keras.backend.backend()`
returns. keras_dist loads it when a device or a strategy is first asked for.
"""

import contextlib
import functools
from abc import ABC
from abc import abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import keras

from keras_dist.core.cluster import Cluster
from keras_dist.core.communication import CommunicationOptions
from keras_dist.core.device import Device
from keras_dist.core.plan import Plan
from keras_dist.errors import BackendNotFoundError
from keras_dist.errors import ClusterError
from keras_dist.plugin.compilation import Compiler
from keras_dist.plugin.executor import Executor

ENTRY_POINT_GROUP = "keras_dist.backends"


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
