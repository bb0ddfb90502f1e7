"""Compiles the programs that were noted for a machine, and reads them."""

import functools
import math
import time
from typing import Any

import jax

from keras_dist.plugins import CompiledProgram
from keras_dist_jax.machine import RECEIVED
from keras_dist_jax.machine import Machine
from keras_dist_jax.machine import Noted
from keras_dist_jax.targets.flops import flops_of
from keras_dist_jax.targets.hlo import collectives_in
from keras_dist_jax.targets.hlo import host_transfers_in

BATCH = "batch"


def compiled_program(noted: Noted, machine: Machine) -> CompiledProgram:
    """Compiles a program and returns what it does."""
    traced = noted.traced
    groups = {
        name: sum(map(_bytes_on_a_device, jax.tree.leaves(arrays)))
        for name, arrays in noted.groups.items()
    }
    batch = groups.pop(BATCH, 0)
    received = {name: groups.pop(name) for name in RECEIVED if name in groups}
    of_arrays = [*map(_devices_of, jax.tree.leaves(noted.groups))]
    devices = max(map(len, of_arrays), default=1)
    on_host = machine.platform != "cpu" and all(
        device.platform == "cpu"
        for array_devices in of_arrays
        for device in array_devices
    )
    made = functools.partial(
        CompiledProgram,
        name=traced.fun_name,
        devices=devices,
        on_host=on_host,
        state=groups,
        received=received,
        batch=batch,
        flops=flops_of(traced.jaxpr, devices if _is_cut(noted) else 1),
    )
    start = time.monotonic()
    try:
        program = traced.lower().compile(machine.options or None)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        refusal = str(error).splitlines()[0]
        seconds = time.monotonic() - start
        return made(seconds=seconds, refusal=refusal)
    seconds = time.monotonic() - start
    memory, text = program.memory_analysis(), program.as_text()
    aliased = memory.alias_size_in_bytes
    outputs = memory.output_size_in_bytes - aliased
    # Arguments that a program does not use are in memory all the same.
    given = sum(groups.values()) + sum(received.values()) + batch
    padding = max(0, memory.argument_size_in_bytes - given)
    resident = given + padding + outputs
    # A TPU's compiler reports no temporary values, and a GPU's a peak that
    # leaves out some of them.
    peak = max(
        memory.peak_memory_in_bytes, resident + memory.temp_size_in_bytes
    )
    return made(
        padding=padding,
        outputs=outputs,
        aliased=aliased,
        temporary=peak - resident,
        peak=peak,
        collectives=collectives_in(text, devices),
        to_host=host_transfers_in(text),
        seconds=seconds,
    )


def _is_cut(noted: Noted) -> bool:
    """Tells whether devices have different rows of the batch."""
    return any(
        not array.sharding.is_fully_replicated
        for array in jax.tree.leaves(noted.groups.get(BATCH))
        if array.sharding is not None
    )


def _bytes_on_a_device(array: jax.Array) -> int:
    shape = tuple(array.shape)
    if array.sharding is not None:
        shape = array.sharding.shard_shape(shape)
    return math.prod(map(int, shape)) * int(array.dtype.itemsize)


def _devices_of(array: jax.Array) -> set[Any]:
    return set() if array.sharding is None else array.sharding.device_set
