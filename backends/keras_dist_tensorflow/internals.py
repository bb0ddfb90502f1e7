"""The one door to private names in this package.

| name | why |
|---|---|
| `Optimizer._distribution_strategy`, | an adopted optimizer has its |
| `._trainable_variables_indices`, | strategy and its variables' keys from |
| `._exclude_from_weight_decay`, | before they moved |
| `._exclude_from_weight_decay_cache`, | |
| `tf.Variable._unique_id` | such a key |
| `keras.Variable._value` | the framework's variable, in any scope |
| `keras.Model._distribute_strategy` | gives the trainer one replica |
| `keras.Model._symbolic_build` | builds metrics and losses from shapes |
| `._compile_metrics`, `._compile_loss` | tells if that is needed |
| `CompileMetrics._user_metrics`, | metrics that are reset before the model |
| `._user_weighted_metrics` | lists them |
| `keras.Layer._flatten_layers` | tells if the model is built |
| `keras.src.backend.tensorflow.nn.conv` | converts kernels outside of XLA, |
| | which can't read variables of another device |

| `tensorflow.python.autograph.operators.control_flow` | `for` over a |
| | distributed dataset in a `tf.function` |
| `tensorflow.python.distribute.values.PerReplica` | a value that a |
| | `tf.function` takes and returns |
| `tensorflow.python.eager.context` | starts the runtime of several |
| | workers, and asks it about them; the global seed |
| `tensorflow.python.eager.record` | tells if a tape is open |
| `tensorflow.python.pywrap_tfe` | tells if tapes are stopped |
| `tensorflow.python.eager.tape` | makes tapes watch a `HeldVariable` |
| `tensorflow.python.framework.composite_tensor` | the base class of sparse, |
| | ragged and native per-replica values |
| `tensorflow.python.ops.resource_variable_ops.BaseResourceVariable` | the |
| | base class of `HeldVariable` |
| `tensorflow.python.ops.summary_ops_v2._summary_state`, | a replica's |
| `tf.Graph._variable_creator_stack` | thread takes over its caller's |
| | summary writer and variable creators |

`tests/backends/tensorflow/test_internals.py` fails readably when one moves.
"""

import contextlib
import functools
import json
import secrets
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import nn
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.operators import control_flow
from tensorflow.python.distribute.values import PerReplica
from tensorflow.python.eager import context
from tensorflow.python.eager import record
from tensorflow.python.eager import tape
from tensorflow.python.framework.composite_tensor import CompositeTensor
from tensorflow.python.ops import summary_ops_v2
from tensorflow.python.ops.resource_variable_ops import (
    BaseResourceVariable as BaseResourceVariable,
)

from keras_dist.core import value_operators
from keras_dist.internals.keras_internals import Trainer

value_operators.install_arithmetic(PerReplica, "PerReplica")


def native_per_replica(values: Sequence[Any]) -> Any:
    """Makes a native per-replica value, which also counts as one of ours."""
    return PerReplica(tuple(values))


def is_composite(value: Any) -> bool:
    """Returns whether a value is composite: sparse, ragged or per-replica.

    A `tf.function` can return native composite values.
    """
    return isinstance(value, CompositeTensor)


def is_recording() -> bool:
    """Returns whether a tape or forward accumulator records this thread."""
    return bool(record.could_possibly_record())


def is_computed_again() -> bool:
    """Returns whether this thread's tapes are stopped.

    `tf.recompute_grad` stops them in the forward pass, and computes it again
    under a tape.
    """
    return bool(pywrap_tfe.TFE_Py_TapeSetIsStopped())


def watch(variable: BaseResourceVariable) -> None:
    """Tells the tapes of this thread that a variable was read."""
    tape.variable_accessed(variable)


def variable_creators() -> Any:
    """Returns this thread's variable creators, for `in_place_of`."""
    return tf.compat.v1.get_default_graph()._variable_creator_stack


def summary_settings() -> dict[str, Any]:
    """Returns this thread's settings of summaries, for `in_place_of`."""
    return dict(vars(summary_ops_v2._summary_state))


@contextlib.contextmanager
def in_place_of(creators: Any, summaries: Mapping[str, Any]) -> Iterator[None]:
    """Gives this thread another thread's variable creators and summaries."""
    graph = tf.compat.v1.get_default_graph()
    own = vars(summary_ops_v2._summary_state)
    before = graph._variable_creator_stack, dict(own)
    graph._variable_creator_stack = creators
    own.update(summaries)
    try:
        yield
    finally:
        graph._variable_creator_stack = before[0]
        own.update(before[1])


@functools.cache
def silence_advice() -> None:
    """Silences TensorFlow's advice on `MirroredStrategy` run eagerly.

    It is about native methods, which the user has not called.
    """
    tf.get_logger().addFilter(
        lambda record: "MirroredStrategy eagerly" not in str(record.msg)
    )


def register_loop(kind: type) -> None:
    """Makes `for` loops over objects of a class part of a traced graph.

    The class has a method `reduce(initial_state, reduce_func)`.
    """

    def loop(iterable: Any, *args: Any) -> None:
        if tf.executing_eagerly():
            control_flow._py_for_stmt(iterable, *args)
        else:
            control_flow._tf_distributed_iterable_for_stmt(iterable, *args)

    control_flow.for_loop_registry.register(kind, loop)


def native_variable(variable: keras.Variable) -> Any:
    """Returns a variable's `tf.Variable`, or `None` before it has one."""
    if not isinstance(variable, keras.Variable):
        return variable  # optimizers take a `tf.Variable` too
    return variable._value


def replace_native_variable(variable: keras.Variable, native: Any) -> None:
    """Replaces the `tf.Variable` of a `keras.Variable`."""
    variable._value = native


@functools.cache
def install_early_kernels() -> None:
    """Makes convolutions convert their kernel to a tensor first.

    Keras compiles grouped convolutions with XLA, which can't read variables
    of another device.
    """
    original = nn.conv

    @functools.wraps(original)
    def conv(inputs: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kernel, keras.Variable):
            kernel = tf.convert_to_tensor(kernel)
        return original(inputs, kernel, *args, **kwargs)

    nn.conv = conv


def native_key(native: Any) -> Any:
    """Returns the key by which optimizers identify a `tf.Variable`."""
    return native._unique_id


def set_optimizer_strategy(
    optimizer: Any, native: tf.distribute.Strategy
) -> None:
    """Sets the native strategy through which an optimizer updates."""
    optimizer._distribution_strategy = native


def adopt_optimizer(
    optimizer: Any,
    native: tf.distribute.Strategy,
    renamed: Mapping[Any, Any],
) -> None:
    """Sets the strategy of an optimizer and replaces keys of its variables.

    Includes inner optimizers. `optimizer` may be `None`; `renamed` maps keys
    of replaced variables to those of their replacements.
    """
    while optimizer is not None:
        known = vars(optimizer)
        set_optimizer_strategy(optimizer, native)
        if renamed:
            indices = optimizer._trainable_variables_indices
            # A new dict: TensorFlow can't save a tracked one that was cleared.
            optimizer._trainable_variables_indices = {
                renamed.get(key, key): i for key, i in indices.items()
            }
            excluded = known.get("_exclude_from_weight_decay")
            if excluded:
                optimizer._exclude_from_weight_decay = {
                    renamed.get(key, key) for key in excluded
                }
            if known.get("_exclude_from_weight_decay_cache"):
                optimizer._exclude_from_weight_decay_cache = {}
        optimizer = known.get("inner_optimizer")


def set_native_strategy(model: keras.Model, strategy: Any) -> None:
    """Sets the stand-in that Keras' trainer uses as native strategy."""
    object.__setattr__(model, "_distribute_strategy", strategy)


def forget_functions(model: keras.Model) -> None:
    """Drops the compiled steps of a model and of the models in it."""
    for layer in model._flatten_layers():
        if isinstance(layer, Trainer):
            layer.train_function = None
            layer.test_function = None
            layer.predict_function = None


def layers_are_built(model: keras.Model) -> bool:
    """Returns whether calling the model would create no variable.

    A model without `call`, trained by its own `train_step`, is never marked
    as built: only its layers count.
    """
    return all(
        layer.built or not _has_own_call(layer)
        for layer in model._flatten_layers()
    )


def _has_own_call(layer: keras.Layer) -> bool:
    return type(layer).call not in (keras.Model.call, keras.Layer.call)


def compiled_parts_are_built(model: keras.Model) -> bool:
    """Returns whether the metrics and loss given to `compile` are built."""
    parts = (
        getattr(model, "_compile_metrics", None),
        getattr(model, "_compile_loss", None),
    )
    return all(part is None or part.built for part in parts)


def metrics_to_build(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns metrics given to `compile` that the model doesn't list yet."""
    compiled = getattr(model, "_compile_metrics", None)
    if compiled is None or compiled.built:
        return []
    given = (compiled._user_metrics, compiled._user_weighted_metrics)
    return [
        metric
        for metric in keras.tree.flatten(given)
        if isinstance(metric, keras.metrics.Metric)
    ]


def build_compiled_parts(model: keras.Model, batch: Any) -> None:
    """Builds a model's metrics and loss from the shapes of a batch."""
    model._symbolic_build(data_batch=batch)


def has_started() -> bool:
    """Returns whether TensorFlow has started, so that its devices are final."""
    return bool(context.context()._initialized)


def configure_runtime(
    job: str,
    addresses: Sequence[str],
    index: int,
    joining_ms: int,
    silence_ms: int,
) -> None:
    """Prepares this worker's runtime, before TensorFlow has started.

    Args:
        job: String, the name of the workers' job.
        addresses: Sequence of each worker's `"host:port"`.
        index: Integer, this worker's position among them.
        joining_ms: Integer, time that workers wait for one another.
        silence_ms: Integer, time without a heartbeat after which a worker
            counts as lost.
    """
    runtime = context.context()
    leader = f"/job:{job}/replica:0/task:0"
    own_devices_only = (f"/job:{job}/task:{index}",)
    runtime.configure_collective_ops(
        collective_leader=leader, device_filters=own_devices_only
    )
    runtime.configure_coordination_service(
        "standalone",
        service_leader=leader,
        cluster_register_timeout_in_ms=joining_ms,
        heartbeat_timeout_in_ms=silence_ms,
    )
    service = runtime.coordination_service
    # Without this, workers wait for missing ones forever.
    service.cluster_register_with_barrier = True
    service.coordinated_job_list.add(name=job, num_tasks=len(addresses))
    runtime.enable_collective_ops(
        tf.train.ServerDef(
            cluster=tf.train.ClusterSpec({job: addresses}).as_cluster_def(),
            default_session_config=runtime.config,
            job_name=job,
            task_index=index,
            protocol="grpc",
        )
    )


def start_runtime() -> None:
    """Starts TensorFlow, and with it this worker's server."""
    context.context().ensure_initialized()


def is_healthy(task: str, timeout_ms: int) -> bool:
    """Returns whether a worker, by TensorFlow's name of it, answers in time."""
    try:
        context.context().check_collective_ops_peer_health(task, timeout_ms)
    except tf.errors.OpError:
        return False
    return True


def wait_for_all_workers(name: str, timeout_ms: int) -> None:
    """Waits at a barrier of all workers, whose name is used only once.

    Raises:
        tf.errors.OpError: If a worker does not come in time.
    """
    context.context().wait_at_barrier(name, timeout_ms)


def tell_all_workers(message: str) -> None:
    """Makes the collectives of all workers fail with a message."""
    context.context().report_error_to_cluster(tf.errors.ABORTED, message)


def runtime_task() -> int | None:
    """Returns this worker's index among several, `None` without others."""
    server = context.context()._collective_ops_server_def
    return None if server is None else int(server.task_index)


def random_state() -> str:
    """Returns the global seed and the state of the draws of operations' seeds.

    Sets a global seed if there is none, because TensorFlow draws a seed
    wherever it finds none.
    """
    now = context.context()
    if context.global_seed() is None:
        tf.random.set_seed(secrets.randbelow(2**31))
    return json.dumps([int(context.global_seed()), now._rng.getstate()])


def set_random_state(state: str) -> None:
    """Restores a state that `random_state` returned, on any worker."""
    seed, (version, numbers, gauss) = json.loads(state)
    tf.random.set_seed(seed)
    context.context()._rng.setstate((version, tuple(numbers), gauss))
