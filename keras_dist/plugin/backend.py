"""Backend: the plugin interface for one framework."""

import contextlib
import functools
import os
from abc import ABC
from abc import abstractmethod
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import keras

from keras_dist.core.device import Device
from keras_dist.core.options import CommunicationOptions
from keras_dist.core.plan import Cluster
from keras_dist.core.plan import Plan
from keras_dist.errors import BackendNotFoundError
from keras_dist.errors import ClusterError
from keras_dist.errors import DeviceError
from keras_dist.errors import UnsupportedModelError
from keras_dist.internals.hooks import Hook
from keras_dist.plugin.compiler import Compiler
from keras_dist.plugin.executor import Executor
from keras_dist.plugin.profiler import Profiler

ENTRY_POINT_GROUP = "keras_dist.backends"


class Backend(ABC):
    """One framework's devices, and the executors for plans on them."""

    @abstractmethod
    def list_devices(self) -> Sequence[Device]:
        """Returns all devices of this worker, accelerators and CPUs."""

    @abstractmethod
    def set_virtual_devices(self, num_devices: int, device_type: str) -> None:
        """Makes one physical device appear as several.

        Args:
            num_devices: Integer, at least 1.
            device_type: String, `"cpu"`.

        Raises:
            VirtualDevicesError: If the framework has started already.
            DeviceError: If devices of that type can't be split.
        """

    def join(self, cluster: Cluster, options: CommunicationOptions) -> None:
        """Makes this process a worker of a cluster, for as long as it lives.

        It is called before devices are listed, and executors of plans with a
        cluster use its connections. Joining the same cluster again does
        nothing.

        Args:
            cluster: The `Cluster` to join.
            options: `CommunicationOptions` of the cluster's collectives.

        Raises:
            ClusterError: If the process belongs to another cluster already,
                if an address is in use or unknown, if options don't fit, or
                if workers of another job meet there.
            WorkerLostError: If not all workers came in time.
            RuntimeError: If the framework has started already.
        """
        raise ClusterError(
            f"The backend '{keras.backend.backend()}' trains on one worker "
            f"only. Received: a cluster of {cluster.num_workers}. Choose "
            "another backend with KERAS_BACKEND."
        )

    def check_alone(self) -> None:
        """Raises if the framework connects this process with others already.

        It is called where no cluster is found. Each worker would then train
        alone, without a word. By default it does nothing.

        Raises:
            ClusterError: If the framework's own runtime has several processes,
                which this backend has not joined.
        """

    @abstractmethod
    def executor(self, plan: Plan) -> Executor:
        """Creates an executor that keeps a copy of variables on each device.

        The executor is bound to the plan.
        """

    def central_executor(self, plan: Plan) -> Executor:
        """Creates an executor that keeps a single copy of each variable.

        Raises:
            UnsupportedModelError: If the backend has no such executor.
        """
        raise UnsupportedModelError(
            f"The backend '{keras.backend.backend()}' keeps a copy of each "
            "variable on each device. Received: CentralStorageStrategy. "
            "Expected: MirroredStrategy, or a backend with central storage "
            "('jax', 'tensorflow' or 'torch'), chosen with KERAS_BACKEND."
        )

    def hooks(self) -> Iterable[Hook]:
        """Returns what this backend replaces in Keras and the framework.

        The rows precede those of the front end, and are in place as long.
        """
        return ()

    def random_state(self) -> str:
        """Returns the state of the framework's global random generators.

        The result is empty for a framework without any. A framework that
        draws its seed at the first use draws it now.
        """
        return ""

    def set_random_state(self, state: str) -> None:
        """Restores a state that `random_state` returned on any worker."""

    def compiler(self) -> Compiler | None:
        """Returns the compiler of functions outside of any strategy.

        The result is `None` if the framework can't compile functions.
        """
        return None

    def profiler(self) -> Profiler | None:
        """Returns the framework's profiler, the same object at each call.

        The result is `None` if the framework has no profiler.
        """
        return None

    def print(
        self, values: Sequence[Any], sep: str, end: str, replica: Any
    ) -> None:
        """Prints values; in a compiled function, each time it runs.

        Args:
            values: Sequence of tensors, other objects, or nests of them.
            sep: String between the values.
            end: String after the last value.
            replica: The replica's index, an integer or tensor, for a prefix
                such as `replica 0: `; `None` if there is only one replica.
        """
        prefix = "" if replica is None else f"replica {int(replica)}: "
        # One call of `print`, because threads may print at the same time.
        text = sep.join(map(str, values))
        print(f"{prefix}{text}{end}", end="")

    def plan_of_native(self, strategy: object) -> Plan:
        """Returns the plan of one of the framework's native strategies.

        Args:
            strategy: The framework's strategy object.

        Raises:
            TypeError: If the object is not a supported native strategy.
        """
        raise TypeError(
            f"The backend '{keras.backend.backend()}' has no native "
            f"strategies that keras_dist can use. Received: {strategy!r} of "
            f"type {type(strategy).__name__}. Make a strategy of keras_dist, "
            "or choose another backend with KERAS_BACKEND."
        )


_overrides: list[Backend] = []


@contextlib.contextmanager
def override_backend(backend: Backend) -> Iterator[Backend]:
    """Uses `backend` in place of the installed plugin; for tests."""
    _overrides.append(backend)
    try:
        yield backend
    finally:
        _overrides.remove(backend)


def get_backend() -> Backend:
    """Returns the plugin of the Keras backend in use.

    Raises:
        BackendNotFoundError: If none is installed. The message names the
            extra to install.
    """
    return _overrides[-1] if _overrides else _load(keras.backend.backend())


@functools.cache
def _load(name: str) -> Backend:
    plugins = {e.name: e for e in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in plugins:
        raise BackendNotFoundError(
            f"keras_dist has no plugin for the Keras backend '{name}'. "
            f"Installed: {sorted(plugins) or 'none'}. Choose one of them with "
            "the environment variable KERAS_BACKEND, or install a plugin "
            f"that registers '{name}' under '{ENTRY_POINT_GROUP}'."
        )
    try:
        backend: Backend = plugins[name].load()()
    except ModuleNotFoundError as error:
        raise BackendNotFoundError(
            f"The keras_dist plugin for '{name}' needs the module "
            f"'{error.name}', which is not installed. Install it with "
            f"`pip install 'keras-dist[{name}]'`."
        ) from error
    return backend


VIRTUAL_DEVICES_VARIABLE = "KERAS_DIST_VIRTUAL_DEVICES"


def list_devices(device_type: str | None = None) -> list[str]:
    """Returns the names of this worker's devices, accelerators first.

    Args:
        device_type: String, `"cpu"`, `"gpu"` or `"tpu"`, or `None` for all.

    Returns:
        List of strings, such as `["gpu:0", "gpu:1", "cpu:0"]`.

    Example:

    >>> "cpu:0" in keras_dist.list_devices("cpu")
    True
    """
    asked = None if device_type is None else device_type.lower()
    if asked not in (None, "cpu", "gpu", "tpu"):
        raise DeviceError(
            "`device_type` must be None, 'cpu', 'gpu' or 'tpu'. Received: "
            f"{device_type!r}."
        )
    devices = sorted(
        get_backend().list_devices(),
        key=lambda d: (not d.is_accelerator, d.type, d.index),
    )
    return [str(d) for d in devices if asked in (None, d.type)]


def set_virtual_devices(num_devices: int, device_type: str = "cpu") -> None:
    """Makes the CPU appear as several devices, for tests and experiments.

    Call it before anything uses a device. The environment variable
    KERAS_DIST_VIRTUAL_DEVICES has the same effect when keras_dist is imported.

    Args:
        num_devices: Integer, at least 1.
        device_type: String, `"cpu"`.

    Raises:
        VirtualDevicesError: If another number of devices is in use already.
        DeviceError: If `device_type` can't be split.

    Example:

    ```python
    import keras_dist
    keras_dist.set_virtual_devices(4)
    keras_dist.MirroredStrategy().num_replicas_in_sync  # 4
    ```
    """
    if (
        not isinstance(num_devices, int)
        or isinstance(num_devices, bool)
        or num_devices < 1
    ):
        raise ValueError(
            "`num_devices` must be an integer of at least 1. Received: "
            f"{num_devices!r}."
        )
    if device_type.lower() != "cpu":
        raise DeviceError(
            "Only the CPU can be split into virtual devices. Received: "
            f"device_type={device_type!r}. Expected: 'cpu'."
        )
    get_backend().set_virtual_devices(num_devices, device_type.lower())


def apply_environment() -> None:
    """Makes the virtual devices that KERAS_DIST_VIRTUAL_DEVICES asks for."""
    value = os.environ.get(VIRTUAL_DEVICES_VARIABLE)
    if not value:
        return
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(
            f"{VIRTUAL_DEVICES_VARIABLE} must be an integer of at least 1. "
            f"Received: {value!r}."
        )
    set_virtual_devices(int(value))
