"""Sharded checkpoints, by `torch.distributed.checkpoint`.

Each worker writes its parts of `DTensor`s, and the chief all other variables.
The workers exchange their plans themselves: PyTorch would need a default
process group, which is hidden from Keras.
"""

import base64
import contextlib
import os
import pickle
import threading
import zlib
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import torch
import torch.distributed.checkpoint as files
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.tensor import DTensor

from keras_dist.plugins import Executor
from keras_dist.plugins import Hook
from keras_dist.plugins import Hooks
from keras_dist.plugins import Writing
from keras_dist.plugins import replaced
from keras_dist.plugins import seen_warnings
from keras_dist_torch.record import TorchRecord


def save(
    executor: Executor | None,
    variables: Mapping[str, keras.Variable],
    folder: str,
    copies: bool,
) -> Writing:
    """Begins to write variables, each worker its parts."""
    workers = None if executor is None else executor.workers
    cluster = None if workers is None else workers.cluster
    is_chief, index = True, 0
    if cluster is not None:
        is_chief, index = cluster.is_chief, cluster.index
    state = {}
    for name, variable in variables.items():
        value = _value_of(variable)
        if isinstance(value, DTensor):
            state[name] = value
        elif is_chief:
            # To the host: a slot in pieces is whole here only.
            state[name] = value.cpu()
    if copies:
        state = _copied(state)
    planner = files.DefaultSavePlanner()
    writer = files.FileSystemWriter(folder)

    def plan() -> str:
        planner.set_up_planner(state, writer.storage_meta(), is_chief)
        writer.set_up_storage_writer(is_chief)
        return _packed(writer.prepare_local_plan(planner.create_local_plan()))

    if workers is None:
        texts = [plan()]
    else:
        what = "plan its parts of a checkpoint"
        name = f"{os.path.basename(folder)}/plan"
        texts = workers.do_all(name, what, plan)
    plans = [*map(_unpacked, texts)]
    # Each worker makes the same plan of the plans.
    plans, metadata = planner.create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    return _TensorsWriting(
        writer, planner, planner.finish_plan(plans[index]), metadata
    )


class _TensorsWriting(Writing):
    """Tensors that are planned, and where they are written."""

    def __init__(
        self, writer: Any, planner: Any, plan: Any, metadata: Any
    ) -> None:
        self._writer = writer
        self._planner = planner
        self._plan = plan
        self._metadata = metadata

    def write(self) -> str:
        written = self._writer.write_data(self._plan, self._planner)
        return _packed(written.wait())

    def finish(self, texts: Sequence[str]) -> None:
        self._writer.finish(self._metadata, [*map(_unpacked, texts)])


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Copies tensors, and parts of `DTensor`s, to the host's memory."""
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    copied: dict[str, Any] = DefaultStager(options).stage(state)
    return copied


def _packed(value: object) -> str:
    """Makes a short text of an object."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def _unpacked(text: str) -> Any:
    return pickle.loads(zlib.decompress(base64.b64decode(text)))


def restore(
    variables: Mapping[str, keras.Variable],
    folder: str,
) -> None:
    """Sets variables, of which each worker reads its parts."""
    state = {name: _to_fill(variable) for name, variable in variables.items()}
    reader = files.FileSystemReader(folder)
    alone = replaced(_alone, is_meant=True)
    with _hooks, alone, _with_exceptions(), torch.no_grad():
        # Each worker reads alone: nothing is sent.
        files.load(state, storage_reader=reader, no_dist=True)
    for name, variable in variables.items():
        if not isinstance(state[name], DTensor):
            variable.assign(state[name])


def _value_of(variable: keras.Variable) -> torch.Tensor:
    kept = TorchRecord.of(variable).tensor
    if not isinstance(kept, DTensor):
        kept = variable.value
    return kept.detach()


def _to_fill(variable: keras.Variable) -> torch.Tensor:
    """Returns a tensor to read into: the variable's own if it is in parts."""
    kept = TorchRecord.of(variable).tensor
    if isinstance(kept, DTensor):
        return kept.detach()
    with keras.device("cpu"):
        tensor: torch.Tensor = keras.ops.empty(variable.shape, variable.dtype)
    return tensor


@contextlib.contextmanager
def _with_exceptions() -> Iterator[None]:
    """Raises what failed, an interrupt first, in place of PyTorch's error."""
    try:
        yield
    except files.CheckpointException as error:  # no `Exception`
        failures = [failure for failure, _ in error.failures.values()]
        failures.sort(key=lambda failure: isinstance(failure, Exception))
        raise failures[0] from error


class _Alone(threading.local):
    def __init__(self) -> None:
        self.is_meant = False


_alone = _Alone()


def _see(text: str) -> bool:
    return _alone.is_meant and text.startswith("torch.distributed is disabled")


def _table() -> Iterator[Hook]:
    why = "a worker that reads its parts alone is not warned of that"
    yield Hook(state_dict_loader, "warnings", seen_warnings(_see), why)


_hooks = Hooks(_table)
