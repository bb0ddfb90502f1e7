"""The interface for backends and strategies that other packages define.

A strategy's `Plan` says which devices compute and where variables live. An
`Executor` carries out one plan with one framework, and a `Backend` creates
executors. An executor with several replicas is a `ReplicaRunner` too, or a
`StepRunner`, whose models train with `fit`: the front end replaces their steps.
The other names are for executors that call their replicas one by one, for
instance in threads. tutorials/7_writing_your_own.ipynb has an example of each.

A plugin registers its `Backend` under the entry-point group
*keras_dist.backends*, with the name that `keras.backend.backend()` returns.
The names in `__all__` are as stable as those of `keras_dist`. Its own three
backends import from this module and `keras_dist.errors` alone, too, but more
names, which may change in any version.
"""

# `plugins.pyi` lists all names, and the modules that they come from. A name
# is loaded on its first use: some processes import none that needs Keras.

from typing import Any

import lazy_loader

_load, __dir__, _ = lazy_loader.attach_stub("keras_dist", __file__)


__all__ = [
    "Backend",
    "Device",
    "Differentiates",
    "Executor",
    "LockstepThreads",
    "Owners",
    "Plan",
    "Profiler",
    "Replica",
    "ReplicaRunner",
    "Round",
    "RowShard",
    "StepRunner",
    "Storage",
    "get_backend",
    "inherit_thread_state",
    "outside_replicas",
    "override_backend",
    "parse_device",
    "thread_state",
]


def __getattr__(name: str) -> Any:
    """Loads a name from its module."""
    return _load(name)
