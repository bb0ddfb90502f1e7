"""The machines of targets: their devices, as the compilers know them."""

import contextlib
import os
from collections.abc import Iterator
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import jax

from keras_dist.errors import DeviceError
from keras_dist.plugins import Target
from keras_dist_jax.machine import Machine

# The compiler for TPUs looks for a machine with TPUs unless it is told about
# one. The type is any: the slice is said by name.
_TPU_SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Others may compile at the same time.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# The modules with a platform's compiler, one of which is enough.
_COMPILERS = {
    "gpu": ("jax_cuda12_plugin", "jax_cuda13_plugin"),
    "tpu": ("libtpu",),
}
# Slices of other sizes have hosts of four chips.
_ON_ONE_HOST = {
    *((kind, sides) for kind in ("v5e", "v6e") for sides in ((1, 1), (2, 4))),
    *((kind, (1, 1, 1)) for kind in ("v5p", "tpu7x")),
}
_NO_TUNING = {"xla_gpu_autotune_level": "0"}  # it would run kernels
_HOPPER = {
    "core_count": 132,
    "fpus_per_core": 128,
    "shared_memory_per_core": 233_472,
    "shared_memory_per_block_optin": 232_448,
    "l2_cache_size": 52_428_800,
    "clock_rate_ghz": 1.98,
}
# Figures of each kind of GPU, and those that all kinds share.
_GPUS = {
    "a100": {
        "core_count": 108,
        "fpus_per_core": 64,
        "shared_memory_per_core": 167_936,
        "shared_memory_per_block_optin": 166_912,
        "l2_cache_size": 41_943_040,
        "clock_rate_ghz": 1.41,
        "memory_bandwidth": 2_039_000_000_000,
    },
    "h100": _HOPPER | {"memory_bandwidth": 3_352_320_000_000},
    "h200": _HOPPER | {"memory_bandwidth": 4_800_000_000_000},
}
_OF_ALL_GPUS = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49_152,
    "block_dim_limit_x": 2_147_483_647,
    "block_dim_limit_y": 65_535,
    "block_dim_limit_z": 65_535,
    "registers_per_core_limit": 65_536,
    "registers_per_block_limit": 65_536,
}
_CAPABILITIES = {"a100": (8, 0), "h100": (9, 0), "h200": (9, 0)}


def machine_of(target: Target) -> Machine:
    """Finds a target's devices.

    Raises:
        DeviceError: If the compiler for them is not installed, or if it does
            not know the target.
    """
    platform = target.kind.platform
    if platform == "cpu":
        hosts, count = target.sides
        devices = jax.devices("cpu")
        if len(devices) < hosts * count:
            raise DeviceError(
                f"Target {target} needs as many virtual CPU devices. "
                f"Received: {len(devices)}. Call "
                f"`keras_dist.set_virtual_devices({hosts * count})` first."
            )
        starts = range(0, hosts * count, count)
        return Machine(
            tuple(tuple(devices[start : start + count]) for start in starts), {}
        )
    if not any(map(find_spec, _COMPILERS[platform])):
        raise DeviceError(
            f"JAX has no compiler for {target} here. Received: none of the "
            f"packages {' and '.join(_COMPILERS[platform])}. Install them "
            "with: pip install 'keras-dist[targets]'."
        )
    try:
        devices = _topology(target).devices
    except Exception as error:  # the compilers raise several kinds
        raise DeviceError(
            f"JAX's compiler does not know the target {target}. It says: "
            f"{error} Expected: the compilers for JAX {jax.__version__}. "
            "Install them with: pip install 'keras-dist[targets]'."
        ) from error
    by_host: dict[int, list[Any]] = {}
    for device in devices:
        by_host.setdefault(device.process_index, []).append(device)
    options = _NO_TUNING if platform == "gpu" else {}
    return Machine(
        tuple(
            tuple(host_devices) for _, host_devices in sorted(by_host.items())
        ),
        options,
    )


def _topology(target: Target) -> Any:
    from jax.experimental import topologies

    if target.kind.platform == "tpu":
        with _settings(_TPU_SETTINGS):
            return topologies.get_topology_desc(
                str(target), platform="tpu", **_bounds(target)
            )
    hosts, count = target.sides
    return topologies.get_topology_desc(
        target.kind.name,
        platform="cuda",
        topology=f"{hosts}x1x{count}",
        target_config=_description(target),
    )


def _bounds(target: Target) -> dict[str, Any]:
    """Returns the chips of a host, where they are not four as elsewhere."""
    if (target.kind.name, target.sides) not in _ON_ONE_HOST:
        return {}
    return {"chips_per_host_bounds": [*target.sides, 1][:3]}


@contextlib.contextmanager
def _settings(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables that are not set, while open."""
    added = {k: v for k, v in values.items() if k not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _description(target: Target) -> str:
    """Describes a GPU in the form that the compiler reads."""
    name = target.kind.name
    major, minor = _CAPABILITIES[name]
    figures = _OF_ALL_GPUS | _GPUS[name]
    figures["device_memory_size"] = target.kind.memory or 0
    lines = "\n".join(f"  {key}: {value}" for key, value in figures.items())
    return (
        f"gpu_device_info {{\n{lines}\n  cuda_compute_capability "
        f"{{ major: {major} minor: {minor} }}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 patch: 0 }\n"
        f'device_description_str: "{target.kind.title}"\n'
    )
