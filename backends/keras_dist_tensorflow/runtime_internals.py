"""The door to private names of TensorFlow; functions say what each is for."""

import contextlib
import json
import secrets
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_dist.plugins import arithmetic
from keras_dist.plugins import private

pywrap_tfe = private("tensorflow.python.pywrap_tfe")
control_flow = private("tensorflow.python.autograph.operators.control_flow")
DistributedVariable = private(
    "tensorflow.python.distribute.values.DistributedVariable"
)
custom_gradient = private("tensorflow.python.ops.custom_gradient")
_PerReplica: type[Any] = private(
    "tensorflow.python.distribute.values.PerReplica"
)
_PerReplicaSpec: type[Any] = private(
    "tensorflow.python.distribute.values.PerReplicaSpec"
)
context = private("tensorflow.python.eager.context")
record = private("tensorflow.python.eager.record")
tape = private("tensorflow.python.eager.tape")
op_callbacks = private("tensorflow.python.framework.op_callbacks")
CompositeTensor = private(
    "tensorflow.python.framework.composite_tensor.CompositeTensor"
)
EagerTensor = private("tensorflow.python.framework.ops.EagerTensor")
summary_ops_v2 = private("tensorflow.python.ops.summary_ops_v2")
BaseResourceVariable: type[Any] = private(
    "tensorflow.python.ops.resource_variable_ops.BaseResourceVariable"
)

for _name in (
    "tensorflow.python.autograph.operators.control_flow._py_for_stmt",
    "tensorflow.python.autograph.operators.control_flow"
    "._tf_distributed_iterable_for_stmt",
    "tensorflow.python.autograph.operators.control_flow.for_loop_registry",
    "tensorflow.python.eager.context.context",
    "tensorflow.python.eager.context.global_seed",
    "tensorflow.python.eager.record.could_possibly_record",
    "tensorflow.python.eager.tape.variable_accessed",
    "tensorflow.python.framework.op_callbacks.add_op_callback",
    "tensorflow.python.framework.op_callbacks.remove_op_callback",
    "tensorflow.python.ops.custom_gradient._eager_mode_decorator",
    "tensorflow.python.ops.custom_gradient._graph_mode_decorator",
    "tensorflow.python.ops.summary_ops_v2._summary_state",
    "tensorflow.python.pywrap_tfe.TFE_Py_TapeSetIsStopped",
    "tensorflow.python.pywrap_tfe.TFE_Py_UID",
):
    private(_name)


class NativePerReplica(_PerReplica):
    """A native per-replica value that computes as one of ours.

    Traces take and return it; they know it by its `_type_spec`.
    """

    @property
    def _type_spec(self) -> Any:
        return _NativePerReplicaSpec(*map(tf.type_spec_from_value, self.values))


class _NativePerReplicaSpec(_PerReplicaSpec):
    __slots__ = ()
    value_type = property(lambda self: NativePerReplica)

    def _from_components(self, tensor_list: object) -> NativePerReplica:
        return NativePerReplica(tensor_list)


for _name, _method in arithmetic(NativePerReplica, "PerReplica").items():
    setattr(NativePerReplica, _name, _method)
NativePerReplica.__name__ = "PerReplica"  # what users know


def is_composite(value: object) -> bool:
    """Tells if a value is sparse, ragged or per-replica to TensorFlow."""
    return isinstance(value, CompositeTensor)


def is_recording() -> bool:
    """Tells if a tape records here, or `tf.recompute_grad` has stopped it."""
    is_stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
    return bool(record.could_possibly_record() or is_stopped)


def watch(variable: object) -> None:
    """Tells the tapes of this thread that a variable was read."""
    tape.variable_accessed(variable)


def captured_creation() -> Callable[..., Any]:
    """Captures variable creators and summaries for another thread."""
    creators = tf.compat.v1.get_default_graph()._variable_creator_stack
    summaries = dict(vars(summary_ops_v2._summary_state))

    @contextlib.contextmanager
    def taken_over(writes: bool) -> Iterator[None]:
        graph = tf.compat.v1.get_default_graph()
        state = vars(summary_ops_v2._summary_state)
        before = graph._variable_creator_stack, dict(state)
        graph._variable_creator_stack = creators
        state.update(summaries if writes else {**summaries, "writer": None})
        try:
            yield
        finally:
            graph._variable_creator_stack = before[0]
            state.update(before[1])

    return taken_over


def hook_filter(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps the filter of TensorFlow's log, which drops an advice."""

    def keep(record: Any) -> Any:
        is_advice = "MirroredStrategy eagerly" in str(record.msg)
        return not is_advice and original(record)

    return keep


def register_loop(kind: type) -> None:
    """Makes `for` over a class that has `reduce` part of a traced graph."""

    def loop(iterable: object, *args: Any) -> None:
        if tf.executing_eagerly():
            control_flow._py_for_stmt(iterable, *args)
        else:
            control_flow._tf_distributed_iterable_for_stmt(iterable, *args)

    control_flow.for_loop_registry.register(kind, loop)


def has_started() -> bool:
    return bool(context.context()._initialized)


def configure_runtime(
    job: str,
    addresses: Sequence[str],
    index: int,
    joining_ms: int,
    silence_ms: int,
) -> None:
    """Prepares this worker's runtime, before TensorFlow has started."""
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
    context.context().ensure_initialized()


def is_healthy(task: str, timeout_ms: int) -> bool:
    """Returns whether a worker, by TensorFlow's name of it, answers in time."""
    try:
        context.context().check_collective_ops_peer_health(task, timeout_ms)
    except tf.errors.OpError:
        return False
    return True


def wait_for_all_workers(name: str, timeout_ms: int) -> None:
    """Waits at a barrier of all workers, whose name is used only once."""
    context.context().wait_at_barrier(name, timeout_ms)


def tell_all_workers(message: str) -> None:
    """Makes the collectives of all workers fail with a message."""
    context.context().report_error_to_cluster(tf.errors.ABORTED, message)


def write_text(key: str, text: str) -> None:
    """Replaces the text under a key, for all workers."""
    runtime = context.context()
    with contextlib.suppress(tf.errors.NotFoundError):
        runtime.delete_config_key_value(key)
    runtime.set_config_key_value(key, text)


def read_text(key: str, timeout_ms: int) -> str:
    """Returns the text under a key, empty if there is none in time."""
    try:
        return str(context.context().get_config_key_value(key, timeout_ms))
    except tf.errors.DeadlineExceededError:
        return ""


def abort_collectives(message: str) -> None:
    """Makes the collectives of this worker fail with a message."""
    context.context().abort_collective_ops(tf.errors.ABORTED, message)


def runtime_task() -> int | None:
    """Returns this worker's index among several, `None` without others."""
    server = context.context()._collective_ops_server_def
    return None if server is None else int(server.task_index)


def random_state() -> str:
    """Returns the global seed and the state of operations' seeds."""
    now = context.context()
    if context.global_seed() is None:
        tf.random.set_seed(secrets.randbelow(2**31))
    return json.dumps([int(context.global_seed()), now._rng.getstate()])


def set_random_state(state: str) -> None:
    """Restores a state that `random_state` returned, on any worker."""
    seed, (version, numbers, gauss) = json.loads(state)
    tf.random.set_seed(seed)
    context.context()._rng.setstate((version, tuple(numbers), gauss))


def captures_of(function: Any) -> list[Any]:
    """Returns the tensors from outside that a `tf.function` has captured."""
    return [
        tensor
        for concrete in function._list_all_concrete_functions()
        for tensor, _ in concrete.graph.captures
    ]


def tensors_so_far() -> int:
    """Returns a number smaller than the `_id` of any tensor made later."""
    return int(pywrap_tfe.TFE_Py_UID())


def is_made_outside(tensor: Any, start: int) -> bool:
    """Tells if a tensor is of before a step or outside of its graph."""
    if isinstance(tensor, EagerTensor):
        return bool(tensor._id < start)
    return tensor.op.type == "Placeholder" or not is_in_this_graph(tensor)


def is_in_this_graph(tensor: Any) -> bool:
    graph = tf.compat.v1.get_default_graph()
    return isinstance(tensor, EagerTensor) or tensor.graph is graph


def body_of(call: tf.Operation) -> Any:
    """Returns the graph of the called function, `None` if unknown."""
    name = call.get_attr("f").name
    try:
        return call.graph._get_function(name).graph
    except AttributeError:  # not the function of a `tf.function`
        return None


@contextlib.contextmanager
def watching_operations(callback: Callable[..., None]) -> Iterator[None]:
    """Calls `callback` for each operation that this thread runs."""
    if callback in context.context().op_callbacks:
        yield  # a native replica's thread shares the list with the others
        return
    op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(callback)


def hook_conversion(kind: Any, _: None) -> Callable[[Any], Any]:
    """Returns the conversion of a mirrored variable to a Python number."""
    return lambda variable: kind(variable.read_value())
