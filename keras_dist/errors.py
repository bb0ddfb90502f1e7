"""Exceptions of keras_dist.

```
KerasDistError
├── BackendNotFoundError     (ImportError)   no plugin for this Keras backend
├── UnsupportedKerasError    (ImportError)   a Keras that we were not made for
├── DeviceError              (ValueError)    unknown, absent or repeated device
├── VirtualDevicesError      (RuntimeError)  asked for after devices were used
├── StrategyMismatchError    (RuntimeError)  two strategies share a thing
├── UnsupportedModelError    (ValueError)    a model that can't be distributed
├── MetricMergeError         (ValueError)    metric state with no exact merge
├── ReplicaDivergenceError   (RuntimeError)  replicas took different paths
├── TraceError               (TypeError)     code that can't be compiled
├── ClusterError             (ValueError)    workers that can't be found or met
├── WorkerLostError          (RuntimeError)  a worker died, hangs or never came
└── OutOfRangeError          (StopIteration) no data is left
```

Each also derives from the builtin named in brackets, so that code written for
`tf.distribute` and for Keras keeps catching what it caught. Messages say what
was received, what was expected and what to do.
"""

from typing import TYPE_CHECKING

# A worker that ends with it asks to be started again: it has saved its state,
# or lost another worker.
RESTART_EXIT_CODE = 42


class KerasDistError(Exception):
    """Base class of every exception that keras_dist raises on purpose."""

    if not TYPE_CHECKING:
        # AutoGraph keeps the type of errors that are made like this.
        __init__ = Exception.__init__


class BackendNotFoundError(KerasDistError, ImportError):
    """No keras_dist plugin serves the Keras backend in use.

    Cause: the framework or the plugin of `keras.backend.backend()` is not
    installed. Fix: install the extra that the message names.
    """


class UnsupportedKerasError(KerasDistError, ImportError):
    """The installed Keras lacks a seam that keras_dist needs.

    Cause: a version outside of the supported range, or a mode (NNX) that
    stores state elsewhere. Fix: as the message says.
    """


class DeviceError(KerasDistError, ValueError):
    """A device is misspelt, absent, or named twice.

    Fix: choose from `keras_dist.list_devices()`, which the message shows.
    """


class VirtualDevicesError(KerasDistError, RuntimeError):
    """Virtual devices were asked for after the backend had started.

    Fix: call `set_virtual_devices` before anything uses a device, or set the
    environment variable KERAS_DIST_VIRTUAL_DEVICES.
    """


class StrategyMismatchError(KerasDistError, RuntimeError):
    """A model, optimizer, variable or scope belongs to another strategy.

    Fix: make everything that works together under one `strategy.scope()`.
    """


class UnsupportedModelError(KerasDistError, ValueError):
    """A model has a part that can't be run on several replicas exactly.

    Fix: the message names the part and the way around it.
    """


class MetricMergeError(KerasDistError, ValueError):
    """A metric changed on several replicas with no exact way to merge it.

    Fix: make the metric an attribute of the model, or pass it to `compile`;
    its updates are then gathered over the replicas.
    """


class ReplicaDivergenceError(KerasDistError, RuntimeError):
    """Replicas met at different points, so that some would wait forever.

    Cause: a branch on per-replica values around a loss, metric, update or
    batch statistic. Fix: take the same path on every replica.
    """


class TraceError(KerasDistError, TypeError):
    """A compiled function does what can't be part of a compiled program.

    Cause: Python that depends on the values of tensors, a variable that is
    made in each call, or a tensor that outlived the trace it belongs to. Fix:
    as the message says, or run it without `keras_dist.function`.
    """


class ClusterError(KerasDistError, ValueError):
    """The workers of a cluster can't be told, or can't be met.

    Cause: variables that contradict each other or miss something, an address
    that is taken or unknown. Fix: what the message says.
    """


class WorkerLostError(KerasDistError, RuntimeError):
    """A worker died, stopped answering, or never came.

    Cause: it was killed, raised an error of its own, hangs or lost its
    network. Fix: see what that worker printed; start all workers again, for
    instance with `keras-dist run --max-restarts`.
    """


class OutOfRangeError(KerasDistError, StopIteration):
    """A distributed iterator is at the end of its data.

    Fix: loop with `for`, ask `get_next_as_optional`, or make a new iterator.
    """
