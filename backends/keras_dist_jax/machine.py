"""Machines that programs are compiled for, whose devices are not here.

While a machine is set, its devices stand in for JAX's. Arrays on them are
described: they are `jax.ShapeDtypeStruct`s with shardings. A program that would
run there is traced and noted, and its results are described too.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import jax

# Groups of arguments that other devices send for the step.
COPIES = "copies of variables"
GRADIENTS = "gradients"
RECEIVED = (COPIES, GRADIENTS)
# Takes a program's arguments; returns groups of them by name. One is the batch.
Names = Callable[..., Mapping[str, Any]]
# Takes a program's described results; returns those that its caller gets.
Gives = Callable[[Any], Any]


@dataclass(frozen=True)
class Noted:
    """A program that would have run, as `jax.stages.Traced`."""

    traced: Any
    groups: Mapping[str, Any]  # described arrays, in nests


@dataclass(frozen=True, eq=False)
class Machine:
    """The devices of a target, by worker, and how to compile for them."""

    devices: tuple[tuple[Any, ...], ...]
    options: dict[str, str]
    noted: list[Noted] = field(default_factory=list)

    @property
    def platform(self) -> str:
        """The platform of its devices, such as `"tpu"`."""
        return str(self.devices[0][0].platform)


# The machine that programs are compiled for; the last is the current one.
_machines: list[Machine] = []


def current_machine() -> Machine | None:
    """Returns the machine to compile for, or `None` to run programs."""
    return _machines[-1] if _machines else None


@contextlib.contextmanager
def compiling_for(machine: Machine) -> Iterator[None]:
    """Makes a machine's devices stand in for JAX's."""
    names = {"devices": jax.devices, "default_backend": jax.default_backend}
    if machine.platform == "tpu":
        # Keras asks for it, to choose kernels. Those for GPUs need cuDNN, which
        # is not here.
        everyones = [
            device for devices in machine.devices for device in devices
        ]
        vars(jax).update(
            devices=lambda platform=None: (
                names["devices"](platform) if platform else everyones
            ),
            default_backend=lambda: machine.platform,
        )
    _machines.append(machine)
    try:
        yield
    finally:
        _machines.pop()
        vars(jax).update(names)


def local_devices() -> Sequence[Any]:
    """Returns the devices of this process, or of a target's first worker."""
    current = current_machine()
    return jax.local_devices() if current is None else current.devices[0]


def devices_by_worker(platform: str | None, num_workers: int) -> list[Any]:
    """Returns each worker's devices, in any order."""
    current = current_machine()
    if current is not None:
        return [list(devices) for devices in current.devices]
    by_worker: list[list[Any]] = [[] for _ in range(num_workers)]
    for device in jax.devices(platform):
        by_worker[device.process_index].append(device)
    return by_worker


def is_elsewhere(device: Any) -> bool:
    """Tells whether a device belongs to a machine that is not here."""
    return current_machine() is not None and device.platform != "cpu"


def is_described(array: jax.Array) -> bool:
    """Tells whether an array has a shape and no values."""
    return isinstance(array, jax.ShapeDtypeStruct)


def described(array: jax.Array, sharding: object = None) -> Any:
    """Describes an array, or anything with a shape and a dtype."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def described_value(variable: Any, sharding: Any) -> Any:
    """Describes a variable's array; `None` without a shape."""
    shape = variable.shape
    if shape is None or None in shape:
        return None
    return jax.ShapeDtypeStruct(tuple(shape), variable.dtype, sharding=sharding)


class _ToBeNoted:
    """A program that is traced in place of being run."""

    def __init__(
        self, program: Any, names: Names, gives: Gives, noting: Machine
    ) -> None:
        self._program = program
        self._names, self._gives = names, gives
        self._machine = noting

    def __call__(self, *args: Any) -> Any:
        traced = self._program.trace(*args)
        self._machine.noted.append(Noted(traced, self._names(*args)))
        return self._gives(jax.tree.map(described, traced.out_info))


def jit(
    fn: Callable[..., Any],
    names: Names,
    gives: Gives = lambda results: results,
    **options: Any,
) -> Any:
    """Compiles a function as `jax.jit` does, or notes its calls for a target.

    Args:
        fn: The function.
        names: Function that gives groups of the arguments their names.
        gives: Function that takes the described results, and returns those
            that the caller gets.
        **options: Of `jax.jit`.
    """
    program, current = jax.jit(fn, **options), current_machine()
    if current is None:
        return program
    return _ToBeNoted(program, names, gives, current)
