"""PyTorch's `DataLoader`, of which a worker loads its own rows."""

import functools
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

from keras_dist.inputs.own_rows.randomness import OwnRandomness
from keras_dist.inputs.own_rows.shares import Shares
from keras_dist.inputs.own_rows.shares import Taken
from keras_dist.inputs.own_rows.shares import code_of

# An attribute of a loader, true if its `collate_fn` makes a row of each row.
MARK = "own_rows"


def why_all(loader: Any) -> str:
    """Returns why a loader's rows can't be loaded one by one, or ""."""
    from torch.utils import data

    if isinstance(loader.dataset, data.IterableDataset):
        return "an IterableDataset has no rows to choose from"
    if loader.batch_sampler is None:
        return "a DataLoader with batch_size=None has no rows to choose from"
    cls = type(loader)
    for name in ("__iter__", "__len__", "_get_iterator"):
        if getattr(cls, name) is not getattr(data.DataLoader, name):
            return f"{cls.__name__} has a `{name}` of its own"
    if not getattr(loader, "in_order", True):
        return "in_order=False gives batches in any order"
    is_stacking = loader.collate_fn is data.default_collate
    if not is_stacking and not getattr(loader, MARK, False):
        return (
            "a `collate_fn` of your own may mix rows; if it makes one row of "
            f"each, set `loader.{MARK} = True`"
        )
    return ""


def own_loader(loader: Any, shares: Shares) -> Any:
    """Returns a loader of pairs: batches of own rows, and what was taken."""
    from torch.utils import data

    randomness = OwnRandomness(shares.first_replica)
    options = {"prefetch_factor": loader.prefetch_factor}
    if not loader.num_workers:
        options = {}
    return data.DataLoader(
        OwnDataset(loader.dataset, randomness),
        batch_sampler=OwnSampler(loader.batch_sampler, shares),
        collate_fn=functools.partial(_collated, loader.collate_fn),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
        **options,
    )


class OwnIndices(list[Any]):
    """The indices of a worker's own rows, and what they are of the batch."""

    taken: Taken


class OwnSampler:
    """Gives the own part of each batch of indices, which are drawn in full."""

    def __init__(self, inner: Any, shares: Shares) -> None:
        self._inner, self._shares = inner, shares
        # Whether the next batch is taken whole.
        self.is_whole = False

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[OwnIndices]:
        # At once, and not in a generator: this may draw.
        return map(self._own, iter(self._inner))

    def _own(self, indices: Sequence[Any]) -> OwnIndices:
        drawn = list(indices)
        is_whole, self.is_whole = self.is_whole, False
        whole = range(len(drawn))
        own = whole if is_whole else self._shares.of(len(drawn))
        result = OwnIndices(drawn[own.start : own.stop])
        result.taken = Taken.of(own, len(drawn), code_of(drawn))
        return result


class OwnDataset:
    """Loads rows, and leaves no trace in the program's random states."""

    def __init__(self, inner: Any, randomness: OwnRandomness) -> None:
        self._inner = inner
        self._randomness = randomness

    def __len__(self) -> int:
        return len(self._inner)

    def __getitems__(self, indices: OwnIndices) -> tuple[Any, Taken]:
        taken = indices.taken
        # A process that loads has states of its own, the same on all workers.
        is_whole = taken.count == taken.total
        scope = self._randomness.alike if is_whole else self._randomness.apart
        with scope():
            return self._load(indices), taken

    def _load(self, indices: Sequence[Any]) -> Any:
        load = getattr(self._inner, "__getitems__", None)
        if load is not None:
            return load(list(indices))
        return [self._inner[index] for index in indices]


def _collated(
    collate: Callable[[Any], Any], loaded: tuple[Any, Taken]
) -> tuple[Any, Any]:
    import torch

    rows, taken = loaded
    batch = collate(rows)
    # Keras takes both for the same, but not inside of another nest.
    batch = tuple(batch) if type(batch) is list else batch
    return batch, torch.tensor(taken.numbers, dtype=torch.int32)
