"""Checkpoints in parts, by `torch.distributed.checkpoint`.

Each worker writes its parts of `DTensor`s, and the chief all other variables.
The workers exchange their plans themselves: PyTorch would need a default
process group, which is hidden from Keras.
"""

import contextlib
import pickle
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any
from typing import TypeVar

import keras
import torch
import torch.distributed.checkpoint as files
from torch.distributed.tensor import DTensor

from keras_dist.plugin.executor import Executor
from keras_dist.plugin.workers import Workers
from keras_dist_torch.parts import stored

T = TypeVar("T")


def save(
    executor: Executor | None,
    variables: Mapping[str, keras.Variable],
    folder: str,
) -> None:
    """Writes variables, each worker its parts."""
    workers = None if executor is None else executor.workers
    cluster = None if workers is None else workers.cluster
    is_chief, own = True, 0
    if cluster is not None:
        is_chief, own = cluster.is_chief, cluster.index
    state = {}
    for name, variable in variables.items():
        value = _value_of(variable)
        if isinstance(value, DTensor):
            state[name] = value
        elif is_chief:
            # To the host: a slot in pieces is whole here only.
            state[name] = value.cpu()
    planner = files.DefaultSavePlanner()
    writer = files.FileSystemWriter(folder)

    def plan() -> Any:
        planner.set_up_planner(state, writer.storage_meta(), is_chief)
        writer.set_up_storage_writer(is_chief)
        return writer.prepare_local_plan(planner.create_local_plan())

    plans = _everyones(workers, plan)
    # Each worker makes the same plan of the plans.
    plans, metadata = planner.create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)

    def write() -> Any:
        return writer.write_data(
            planner.finish_plan(plans[own]), planner
        ).wait()

    results = _everyones(workers, write)

    def finish() -> None:
        if is_chief:
            writer.finish(metadata, results)

    _everyones(workers, finish)


def restore(
    variables: Mapping[str, keras.Variable],
    folder: str,
) -> None:
    """Sets variables, of which each worker reads its parts."""
    state = {name: _to_fill(variable) for name, variable in variables.items()}
    reader = files.FileSystemReader(folder)
    with _not_warned(), torch.no_grad():
        # Each worker reads alone: nothing is sent.
        files.load(state, storage_reader=reader, no_dist=True)
    for name, variable in variables.items():
        if not isinstance(state[name], DTensor):
            variable.assign(state[name])


def _value_of(variable: keras.Variable) -> torch.Tensor:
    kept = stored(variable)
    if not isinstance(kept, DTensor):
        kept = variable.value
    return kept.detach()


def _to_fill(variable: keras.Variable) -> torch.Tensor:
    """Returns a tensor to read into: the variable's own if it is in parts."""
    kept = stored(variable)
    if isinstance(kept, DTensor):
        return kept.detach()
    with keras.device("cpu"):
        found: torch.Tensor = keras.ops.empty(variable.shape, variable.dtype)
    return found


def _everyones(workers: Workers | None, fn: Callable[[], T]) -> list[T]:
    """Calls a function on each worker, and returns all results on all."""
    if workers is None:
        return [fn()]
    result: T | None = None
    error: Exception | None = None
    try:
        result = fn()
    except Exception as failure:
        error = failure
    workers.check_all(error, "write its parts of a checkpoint")
    text = pickle.dumps(result)
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    sizes = workers.concatenate_numbers([len(text)])
    joined = workers.concatenate(own, 0).cpu()
    return [pickle.loads(each.numpy()) for each in joined.split(sizes)]


@contextlib.contextmanager
def _not_warned() -> Iterator[None]:
    """Drops PyTorch's warning that it loads without other processes."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.distributed is disabled", UserWarning
        )
        yield
