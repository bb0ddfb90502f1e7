"""The interface for backends and strategies that other packages define.

A strategy's `Plan` says which devices compute and where variables live. An
`Executor` carries out one plan with one framework, and a `Backend` creates
executors. The other names are for executors that call their replicas one by
one, for instance in threads. tutorials/7_writing_your_own.ipynb has an example
of each.

A plugin registers its `Backend` under the entry-point group
*keras_dist.backends*, with the name that `keras.backend.backend()` returns.
These names are as stable as those of `keras_dist`; names in other modules may
change in any version.
"""

from keras_dist.backend import Backend
from keras_dist.backend import get_backend
from keras_dist.backend import override_backend
from keras_dist.device import Device
from keras_dist.device import parse_device
from keras_dist.executor import Executor
from keras_dist.plan import Plan
from keras_dist.training.baton import BatonPool
from keras_dist.training.baton import Round
from keras_dist.training.differentiation import Differentiates
from keras_dist.training.keras_internals import inherit_thread_state
from keras_dist.training.keras_internals import thread_state
from keras_dist.training.replica import Replica
from keras_dist.training.replica import ReplicaRunner
from keras_dist.training.replica import StepRunner
from keras_dist.training.shares import Share
from keras_dist.training.step import outside_replicas
from keras_dist.training.steps import step_overrides

__all__ = [
    "Backend",
    "BatonPool",
    "Device",
    "Differentiates",
    "Executor",
    "Plan",
    "Replica",
    "ReplicaRunner",
    "Round",
    "Share",
    "StepRunner",
    "get_backend",
    "inherit_thread_state",
    "outside_replicas",
    "override_backend",
    "parse_device",
    "step_overrides",
    "thread_state",
]
