"""The one door to private names in this package.

| name | why |
|---|---|
| `Optimizer._distribution_strategy`, | an adopted optimizer knows variables |
| `._trainable_variables_indices`, | by the names that they had before |
| `._exclude_from_weight_decay`, | |
| `._exclude_from_weight_decay_cache`, | |
| `tf.Variable._unique_id` | such a name |
| `keras.Variable._value` | the framework's variable, in any scope |
| `keras.Model._distribute_strategy` | the trainer asks it for one replica |
| `keras.Model._symbolic_build` | builds metrics and losses from shapes |
| `._compile_metrics`, `._compile_loss` | whether that is needed |
| `CompileMetrics._user_metrics`, | metrics that the model does not know of |
| `._user_weighted_metrics` | yet start anew |
| `keras.Layer._flatten_layers` | whether the model is built |
| `keras.src.backend.tensorflow.nn.conv` | reads a kernel where variables |
| | of another device can be read |

| `tensorflow.python.autograph.operators.control_flow` | `for` over a |
| | distributed dataset in a `tf.function` |
| `tensorflow.python.distribute.values.PerReplica` | a value that a |
| | `tf.function` takes and returns |
| `tensorflow.python.eager.context` | starts the runtime of several |
| | workers, and asks it about them; the global seed |
| `tensorflow.python.eager.record` | whether a tape is open |
| `tensorflow.python.pywrap_tfe` | whether tapes are stopped |
| `tensorflow.python.eager.tape` | tapes watch a value that was assigned |
| `tensorflow.python.framework.composite_tensor` | whether it is one |
| `tensorflow.python.ops.resource_variable_ops.BaseResourceVariable` | what |
| | such a value passes for |
| `tensorflow.python.ops.summary_ops_v2._summary_state`, | a replica's |
| `tf.Graph._variable_creator_stack` | thread writes and makes what its |
| | caller would |

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
    """A native per-replica value; it counts as one of ours."""
    return PerReplica(tuple(values))


def is_composite(value: Any) -> bool:
    """Whether a `tf.function` can return it: sparse, ragged, per replica."""
    return isinstance(value, CompositeTensor)


def is_recording() -> bool:
    """Whether a tape or an accumulator watches what this thread computes."""
    return bool(record.could_possibly_record())


def is_computed_again() -> bool:
    """Whether tapes of this thread are stopped, as in `tf.recompute_grad`.

    They see what is computed when that computes it again.
    """
    return bool(pywrap_tfe.TFE_Py_TapeSetIsStopped())


def watch(variable: BaseResourceVariable) -> None:
    """Tells the tapes of this thread that a variable was read."""
    tape.variable_accessed(variable)


def variable_creators() -> Any:
    """Who makes variables in this thread, for `in_place_of`."""
    return tf.compat.v1.get_default_graph()._variable_creator_stack


def summary_settings() -> dict[str, Any]:
    """Where this thread writes summaries, for `in_place_of`."""
    return dict(vars(summary_ops_v2._summary_state))


@contextlib.contextmanager
def in_place_of(creators: Any, summaries: Mapping[str, Any]) -> Iterator[None]:
    """Makes variables, and writes summaries, as another thread would.

    Args:
        creators: What `variable_creators` returned there.
        summaries: What `summary_settings` returned there.
    """
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
    """Drops what TensorFlow logs about replicas outside of `tf.function`.

    It advises to wrap native methods that the user has not called.
    """
    tf.get_logger().addFilter(
        lambda record: "MirroredStrategy eagerly" not in str(record.msg)
    )


def register_loop(kind: type) -> None:
    """Makes `for` loops over such datasets part of the graph.

    Args:
        kind: A class with `reduce(initial_state, reduce_func)`.
    """

    def loop(iterable: Any, *args: Any) -> None:
        if tf.executing_eagerly():
            control_flow._py_for_stmt(iterable, *args)
        else:
            control_flow._tf_distributed_iterable_for_stmt(iterable, *args)

    control_flow.for_loop_registry.register(kind, loop)


def native_variable(variable: keras.Variable) -> Any:
    """The `tf.Variable` behind a variable, or `None` before it has one."""
    if not isinstance(variable, keras.Variable):
        return variable  # optimizers take a `tf.Variable` as well
    return variable._value


def replace_native_variable(variable: keras.Variable, native: Any) -> None:
    """Puts another `tf.Variable` behind a variable."""
    variable._value = native


@functools.cache
def install_early_kernels() -> None:
    """Has convolutions read their kernel before they use it.

    Keras has XLA compile those with groups, each on its own, and that reads
    no variable of another device.
    """
    original = nn.conv

    @functools.wraps(original)
    def conv(inputs: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kernel, keras.Variable):
            kernel = tf.convert_to_tensor(kernel)
        return original(inputs, kernel, *args, **kwargs)

    nn.conv = conv


def native_key(native: Any) -> Any:
    """What optimizers know a `tf.Variable` by."""
    return native._unique_id


def set_optimizer_strategy(
    optimizer: Any, native: tf.distribute.Strategy
) -> None:
    """Tells an optimizer who updates its variables."""
    optimizer._distribution_strategy = native


def adopt_optimizer(
    optimizer: Any,
    native: tf.distribute.Strategy,
    renamed: Mapping[Any, Any],
) -> None:
    """Tells an optimizer its strategy, and its variables' new keys.

    Args:
        optimizer: A Keras optimizer, or `None`.
        native: The strategy that updates its variables.
        renamed: Mapping from keys of replaced variables to those that came
            in their place.
    """
    while optimizer is not None:
        known = vars(optimizer)
        set_optimizer_strategy(optimizer, native)
        if renamed:
            indices = optimizer._trainable_variables_indices
            # A new one: TensorFlow saves no dict that was cleared.
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
    """Sets the strategy that Keras' trainer takes for a native one."""
    object.__setattr__(model, "_distribute_strategy", strategy)


def forget_functions(model: keras.Model) -> None:
    """Drops the compiled steps of a model and of the models in it."""
    for layer in model._flatten_layers():
        if isinstance(layer, Trainer):
            layer.train_function = None
            layer.test_function = None
            layer.predict_function = None


def layers_are_built(model: keras.Model) -> bool:
    """Whether calling the model would create no variable.

    A model that is trained by its own `train_step` and can't be called is
    never built itself.
    """
    return all(
        layer.built or not _has_own_call(layer)
        for layer in model._flatten_layers()
    )


def _has_own_call(layer: keras.Layer) -> bool:
    return type(layer).call not in (keras.Model.call, keras.Layer.call)


def compiled_parts_are_built(model: keras.Model) -> bool:
    """Whether what `compile` made (metrics, loss) has its variables."""
    parts = (
        getattr(model, "_compile_metrics", None),
        getattr(model, "_compile_loss", None),
    )
    return all(part is None or part.built for part in parts)


def metrics_to_build(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics given to `compile`, while the model does not know them."""
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
    """Whether TensorFlow knows its devices already, once and for all."""
    return bool(context.context()._initialized)


def configure_runtime(
    job: str,
    addresses: Sequence[str],
    index: int,
    joining_ms: int,
    silence_ms: int,
) -> None:
    """Prepares the runtime of a worker, before TensorFlow has started.

    Args:
        job: String, the name of the workers' job.
        addresses: Sequence of each worker's `"host:port"`.
        index: Integer, which of them this one is.
        joining_ms: Integer, how long the workers wait for one another.
        silence_ms: Integer, after how long without a sign of life a worker is
            lost.
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
    # Else they wait without end for those that don't come.
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
    """Whether a worker answers.

    Args:
        task: String, TensorFlow's name of it.
        timeout_ms: Integer.
    """
    try:
        context.context().check_collective_ops_peer_health(task, timeout_ms)
    except tf.errors.OpError:
        return False
    return True


def wait_for_all_workers(name: str, timeout_ms: int) -> None:
    """Waits until every worker has come to a place.

    Args:
        name: String, that of the place, where workers come once.
        timeout_ms: Integer.

    Raises:
        tf.errors.OpError: If one does not come.
    """
    context.context().wait_at_barrier(name, timeout_ms)


def tell_all_workers(message: str) -> None:
    """Makes collectives of all workers fail, with a message."""
    context.context().report_error_to_cluster(tf.errors.ABORTED, message)


def runtime_task() -> int | None:
    """Which of several workers this one is; `None` if it is alone."""
    server = context.context()._collective_ops_server_def
    return None if server is None else int(server.task_index)


def random_state() -> str:
    """The global seed, and where operations are that draw from it.

    TensorFlow draws a seed wherever there is none: here one is set.
    """
    now = context.context()
    if context.global_seed() is None:
        tf.random.set_seed(secrets.randbelow(2**31))
    return json.dumps([int(context.global_seed()), now._rng.getstate()])


def set_random_state(state: str) -> None:
    """Goes back to what `random_state` returned, on any worker."""
    seed, (version, numbers, gauss) = json.loads(state)
    tf.random.set_seed(seed)
    context.context()._rng.setstate((version, tuple(numbers), gauss))
