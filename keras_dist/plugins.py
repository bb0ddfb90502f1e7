"""The interface for backends and strategies that other packages define.

A strategy's `Plan` says which devices compute and where variables live. An
`Executor` carries out one plan with one framework, and a `Backend` creates
executors. An executor with several replicas is a `ReplicaRunner` too, or a
`StepRunner`, whose models train with `fit`: the front end replaces their steps.
The other names are for executors that call their replicas one by one, for
instance in threads. tutorials/7_writing_your_own.ipynb has an example of each.

A plugin registers its `Backend` under the entry-point group
*keras_dist.backends*, with the name that `keras.backend.backend()` returns.
These names are as stable as those of `keras_dist`. Its own three backends use
more, but only from the packages that these names come from, and from `errors`
and `joining`; names there may change in any version.
"""

from keras_dist.core.device import Device
from keras_dist.core.device import parse_device
from keras_dist.core.plan import Owners
from keras_dist.core.plan import Plan
from keras_dist.core.rows import RowShard
from keras_dist.internals.keras_internals import inherit_thread_state
from keras_dist.internals.keras_internals import thread_state
from keras_dist.plugin.backend import Backend
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.backend import override_backend
from keras_dist.plugin.executor import Executor
from keras_dist.plugin.profiler import Profiler
from keras_dist.plugin.replica import Replica
from keras_dist.plugin.runner import ReplicaRunner
from keras_dist.plugin.runner import StepRunner
from keras_dist.plugin.storage import Storage
from keras_dist.plugin.threads import LockstepThreads
from keras_dist.plugin.threads import Round
from keras_dist.replica.gradients import Differentiates
from keras_dist.replica.state import outside_replicas

__all__ = [
    "Backend",
    "LockstepThreads",
    "Device",
    "Differentiates",
    "Executor",
    "Storage",
    "Owners",
    "Plan",
    "Profiler",
    "Replica",
    "ReplicaRunner",
    "Round",
    "RowShard",
    "StepRunner",
    "get_backend",
    "inherit_thread_state",
    "outside_replicas",
    "override_backend",
    "parse_device",
    "thread_state",
]
