"""Exceptions of keras_dist.

```
KerasDistError
├── BackendNotFoundError     (ImportError)   no plugin for this Keras backend
├── UnsupportedBackendError  (ImportError)   an unsupported framework's version
├── UnsupportedKerasError    (ImportError)   an unsupported version of Keras
├── DeviceError              (ValueError)    unknown, absent or repeated device
├── VirtualDevicesError      (RuntimeError)  asked for after devices were used
├── StrategyMismatchError    (RuntimeError)  an object of another strategy
├── UnsupportedModelError    (ValueError)    a model that can't be distributed
├── MetricMergeError         (ValueError)    metric state with no exact merge
├── ReplicaCodeWarning       (UserWarning)   replicas run code of the user's
├── ReplicaDivergenceError   (RuntimeError)  replicas took different paths
├── TraceError               (TypeError)     code that can't be compiled
├── CheckpointError          (OSError)       can't be written or read
├── ClusterError             (ValueError)    workers unknown or unreachable
├── WorkerLostError          (RuntimeError)  a worker died, hangs or never came
├── NumbersDifferError       (AssertionError) `verify` found other numbers
└── OutOfRangeError          (StopIteration) no data is left
```

Each also derives from the builtin exception in brackets, so that handlers
written for `tf.distribute` and for Keras still catch it. Messages say what was
received, what was expected and what to do. They end with the address of a
section of the page about errors, which shows the mistake and its fix as code.
The command `keras-dist explain` prints the section without the network.
"""

import re
from typing import TYPE_CHECKING
from typing import ClassVar

__all__ = [
    "BackendNotFoundError",
    "CheckpointError",
    "ClusterError",
    "DeviceError",
    "KerasDistError",
    "MetricMergeError",
    "NumbersDifferError",
    "OutOfRangeError",
    "ReplicaCodeWarning",
    "ReplicaDivergenceError",
    "StrategyMismatchError",
    "TraceError",
    "UnsupportedBackendError",
    "UnsupportedKerasError",
    "UnsupportedModelError",
    "VirtualDevicesError",
    "WorkerLostError",
]

# Exit status of a worker that asks to be started again, because it has saved
# its state or lost another worker.
RESTART_EXIT_CODE = 42
# The address of the documentation, with a slash at the end.
SITE = "https://keras-dist.github.io/keras_dist/"


def anchor_of(section: str) -> str:
    """Returns what the address of a section ends with, after `#`."""
    words = re.sub(r"[^\w\s-]", "", section).lower().split()
    return "-".join(words)


def address_of(section: str) -> str:
    """Returns the address of a section of the page about errors."""
    return f"{SITE}errors/#{anchor_of(section)}"


def see_section(section: str) -> str:
    """Returns the end of a message: where a section can be read."""
    command = f"keras-dist explain {anchor_of(section)}"
    return f"See {address_of(section)}, or run: {command}"


class KerasDistError(Exception):
    """Base class of every exception that keras_dist raises on purpose.

    Catch it to handle all of them alike.

    Attributes:
        section: String, the section of the page about errors that explains
            the error; the message ends with its address. Empty for none.

    Example:

    >>> try:
    ...     keras_dist.OneDeviceStrategy("cpu:99")
    ... except keras_dist.KerasDistError as error:
    ...     print(type(error).__name__, error.section)
    DeviceError Devices
    """

    section: ClassVar[str] = ""

    if not TYPE_CHECKING:
        # AutoGraph keeps an error's type only with this `__init__`.
        __init__ = Exception.__init__

    def __str__(self) -> str:
        message = super().__str__()
        if not message or not self.section:
            return message
        hint = see_section(self.section)
        # A message copied from another error has the hint already.
        if hint in message:
            return message
        return f"{message} {hint}"


class BackendNotFoundError(KerasDistError, ImportError):
    """No keras_dist plugin serves the Keras backend in use.

    Cause: the framework or the plugin of `keras.backend.backend()` is not
    installed. Fix: install the extra that the message names, or choose
    another backend with the environment variable KERAS_BACKEND, which Keras
    reads when it is imported.
    """

    section = "The backend is not found"


class UnsupportedBackendError(KerasDistError, ImportError):
    """The installed framework lacks something that keras_dist needs.

    Cause: a version of JAX, TensorFlow or PyTorch that is too old, or so new
    that a private name is gone. Fix: install the version that the message
    names. `keras-dist info` prints which versions are tested.
    """

    section = "The backend is not found"


class UnsupportedKerasError(KerasDistError, ImportError):
    """The installed Keras lacks something that keras_dist needs.

    Cause: a version that is too old, or so new that a private name is gone; or
    a mode (NNX) in which Keras stores state elsewhere. Fix: install the
    version that the message names, or switch the mode off.
    """

    section = "The backend is not found"


class DeviceError(KerasDistError, ValueError):
    """A device is misspelt, absent, or named twice.

    Fix: choose from `keras_dist.list_devices()`, which the message shows, or
    make virtual ones with `keras_dist.set_virtual_devices`.

    Example:

    >>> try:
    ...     keras_dist.MirroredStrategy(["cpu:0", "cpu:0"])
    ... except keras_dist.DeviceError as error:
    ...     print(error)
    Device 'cpu:0' is named 2 times. ...
    """

    section = "Devices"


class VirtualDevicesError(KerasDistError, RuntimeError):
    """Virtual devices were asked for after the backend had started.

    Cause: a framework counts its devices once, when it is used for the first
    time. Fix: call `keras_dist.set_virtual_devices` right after the imports,
    or set the environment variable KERAS_DIST_VIRTUAL_DEVICES. In a notebook,
    restart the kernel first.
    """

    section = "Devices"


class StrategyMismatchError(KerasDistError, RuntimeError):
    """A model, optimizer, variable or scope belongs to another strategy.

    Fix: create objects that are used together under one `strategy.scope()`.

    Example:

    >>> with keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    ...     model = keras.Sequential([keras.layers.Dense(1)])
    >>> try:
    ...     keras_dist.OneDeviceStrategy("cpu:0").distribute(model)
    ... except keras_dist.StrategyMismatchError as error:
    ...     print(error)
    Model ... belongs to <MirroredStrategy on cpu:0, cpu:1> and can't join ...
    """

    section = "Two strategies"


class UnsupportedModelError(KerasDistError, ValueError):
    """A model has a part that can't run exactly on several replicas.

    Cause: a part that needs the rows of other replicas, which no replica has,
    or that can't be sharded, such as an optimizer that needs whole variables
    while its state is sharded. Fix: the message names the part and a
    workaround. On one device every model runs.
    """

    section = "A model that is refused"


class MetricMergeError(KerasDistError, ValueError):
    """A metric changed on several replicas with no exact way to merge it.

    Cause: a layer or a function updates a metric that is not among the
    model's metrics. Fix: make the metric an attribute of the model, or pass it
    to `compile`; its updates are then gathered over the replicas.
    """

    section = "A model that is refused"


class ReplicaCodeWarning(KerasDistError, UserWarning):
    """A warning: each replica runs code of the user's on its own rows.

    Cause: a `train_step`, `compute_loss` or layer of your own, in `fit` on
    TensorFlow and PyTorch. Its numbers count as means over rows. Fix: write
    sums as `keras_dist.sum_over_rows(x)`, and compare the model with one
    device by `strategy.verify`: once they are the same, the warning does not
    come again. Filter it like any warning.

    Example:

    >>> import warnings
    >>> category = keras_dist.ReplicaCodeWarning
    >>> warnings.filterwarnings("ignore", category=category)
    """

    section = "Code of your own"


class ReplicaDivergenceError(KerasDistError, RuntimeError):
    """Replicas made different calls, or left different values.

    Cause: a branch on per-replica values around a loss, metric, update,
    collective or batch statistic; on several workers, different calls or
    different amounts of data. Fix: take the same path on every replica, and
    choose between results afterwards, with `keras.ops.where`. Or a variable
    without an `aggregation` to which replicas assigned different values, or
    an array in the logs of a step. Fix: declare what is meant.

    Example:

    >>> def replica_fn():
    ...     context = keras_dist.get_replica_context()
    ...     if context.replica_id_in_sync_group == 0:
    ...         return context.all_reduce("SUM", keras.ops.ones(()))
    >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> try:
    ...     strategy.run(replica_fn)
    ... except keras_dist.ReplicaDivergenceError as error:
    ...     print(error)
    Replicas took different paths, ... replica 0 at all_reduce with SUM; ...
    """

    # The kind and name of the value that differs, as in `verify`'s report.
    about: "tuple[str, str] | None" = None

    section = "Replicas that disagree"


class TraceError(KerasDistError, TypeError):
    """A compiled function has code that can't be compiled.

    Cause: Python control flow that depends on the values of tensors, a
    variable that is created in each call, or a tensor used after its trace.
    Fix: use `keras.ops.where` and `keras.ops.cond` in place of `if`, create
    variables outside of the function, and return the tensors that are needed
    outside; or don't use `keras_dist.function`.
    """

    section = "What can not be compiled"


class CheckpointError(KerasDistError, OSError):
    """A checkpoint, or a file from which training goes on, is of no use.

    Cause: a full disk, a folder that can't be written, or files that are
    damaged or gone. The error of what wrote or read is its `__cause__`. Fix:
    follow the message. A script may catch it, and restore an older checkpoint.
    """

    section = "A checkpoint that can't be read"


class ClusterError(KerasDistError, ValueError):
    """The workers of a cluster can't be determined, or can't be reached.

    Cause: environment variables that contradict each other or are incomplete,
    an address that is in use or unknown, workers with different settings. Fix:
    follow the message; `keras-dist info` prints the environment variables that
    a process has.

    Example:

    >>> resolvers = keras_dist.cluster_resolver
    >>> spec = resolvers.ClusterSpec({"worker": ["a:9000", "b:9000"]})
    >>> resolver = resolvers.SimpleClusterResolver(
    ...     spec, task_type="worker", task_id=5
    ... )
    >>> try:
    ...     resolvers.cluster_of(resolver)
    ... except keras_dist.ClusterError as error:
    ...     print(error)
    The `task_id` 5 exceeds the maximum id of worker. ...
    """

    section = "Workers that don't meet"


class WorkerLostError(KerasDistError, RuntimeError):
    """A worker died, stopped answering, or never came.

    Cause: the worker was killed, raised an error, hangs or lost its network.
    Fix: first read what that worker printed. Collectives can't be resumed, so
    start all workers again, for instance with `keras-dist run
    --max-restarts`. `keras.callbacks.BackupAndRestore` continues after the
    last complete epoch. If the error is not caught, the process ends with
    status 42.
    """

    section = "When a worker is lost"


class NumbersDifferError(KerasDistError, AssertionError):
    """A model gives other numbers under a strategy than on one device.

    Raised by the method `raise_if_different` of the report that
    `strategy.verify` returns. Fix: the message names the first difference and
    its likely cause.
    """

    section = "The numbers differ"


class OutOfRangeError(KerasDistError, StopIteration):
    """A distributed iterator is at the end of its data.

    Fix: loop with `for`, ask `get_next_as_optional`, or make a new iterator.

    Example:

    >>> strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> batches = [np.ones((4, 1))]
    >>> iterator = iter(strategy.experimental_distribute_dataset(batches))
    >>> _ = iterator.get_next()
    >>> try:
    ...     iterator.get_next()
    ... except keras_dist.OutOfRangeError as error:
    ...     print(error)
    End of the data: there is no next element. ...
    """

    section = "The end of the data"
