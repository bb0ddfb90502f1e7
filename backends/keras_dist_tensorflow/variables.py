"""Variables: made on the plan's devices, or moved there with their values."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from keras_dist.core.components import Component
from keras_dist.core.device import Device
from keras_dist.core.device import parse_device
from keras_dist_tensorflow import internals
from keras_dist_tensorflow import update_internals

_ON_READ = tf.VariableSynchronization.ON_READ


def native_name(device: Device) -> str:
    """TensorFlow's name of a device."""
    return f"/device:{device.type.upper()}:{device.index}"


def components(native: Any) -> tuple[Any, ...]:
    """The copies of a variable, primary first; itself if there is one."""
    if isinstance(native, tf.distribute.DistributedValues):
        return tuple(native.values)
    return (native,)


def devices_of(native: Any) -> tuple[Device, ...]:
    """The devices that hold a copy of a `tf.Variable`."""
    return tuple(parse_device(copy.device) for copy in components(native))


def device_of(tensor: Any) -> Device | None:
    """The device of a tensor; in a trace, which has none yet, `None`."""
    if not isinstance(tensor, tf.Tensor) or not tensor.device:
        return None
    return parse_device(tensor.device)


def copied(
    native: Any,
    synchronization: Any = tf.VariableSynchronization.AUTO,
) -> Any:
    """A new `tf.Variable` with the value of another.

    It is made where the scopes that are open say.
    """
    return tf.Variable(
        components(native)[0].read_value(),
        trainable=native.trainable,
        dtype=native.dtype,
        name=native.name.split(":")[0].split("/")[-1],
        aggregation=native.aggregation,
        synchronization=synchronization,
    )


_moves_so_far = 0


def moves_so_far() -> int:
    """How many variables got another `tf.Variable`, of any strategy."""
    return _moves_so_far


class Moves:
    """Which variables were replaced, and who has not been told yet."""

    def __init__(self) -> None:
        self._renamed: dict[Any, Any] = {}
        # By model and by optimizer, how many moves they know of.
        self._told: weakref.WeakKeyDictionary[Any, int] = (
            weakref.WeakKeyDictionary()
        )

    def move(self, variable: keras.Variable, to: Any) -> None:
        """Puts another `tf.Variable` behind a variable."""
        global _moves_so_far
        _moves_so_far += 1
        old = internals.native_variable(variable)
        self._renamed[internals.native_key(old)] = internals.native_key(to)
        internals.replace_native_variable(variable, to)

    def follow(
        self, model: keras.Model, native: tf.distribute.Strategy
    ) -> None:
        """Brings a model's compiled steps and its optimizer up to date.

        Args:
            model: A `keras.Model`.
            native: The strategy that updates its variables.
        """
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            renamed = self._renamed if self._is_news(optimizer) else {}
            internals.adopt_optimizer(optimizer, native, renamed)
        if self._is_news(model):
            internals.forget_functions(model)

    def _is_news(self, owner: Any) -> bool:
        count = len(self._renamed)
        if self._told.get(owner, 0) == count:
            return False
        self._told[owner] = count
        return True


def default_device() -> str:
    """Where this thread makes tensors."""
    with tf.init_scope():
        device: str = tf.constant(0.0).device
    return device


def put(value: Any, device: Device) -> Any:
    """A tensor on a device."""
    with tf.device(native_name(device)):
        return tf.identity(ops.convert_to_tensor(value))


def is_native(value: Any) -> bool:
    """Whether it is a variable of TensorFlow's, not one of Keras'."""
    return isinstance(value, tf.Variable)


def snapshot(value: Any, index: int) -> Any:
    """What a variable of TensorFlow's keeps now; anything else as it is.

    Args:
        value: Anything.
        index: Integer, the replica whose copy is read.
    """
    if not is_native(value):
        return value
    copies = components(value)
    own = copies[index % len(copies)]
    # A read is on the current device, and not on the variable's.
    with tf.device(own.device):
        return own.read_value()


def apart(fn: Callable[[], Any], device: Device) -> Any:
    """Calls `fn` eagerly on a device, under no strategy and in no trace.

    A thread of its own starts with none, which nothing else can be made to
    forget.
    """
    results: list[Any] = []

    def call() -> None:
        try:
            with tf.device(native_name(device)):
                results.extend((fn(), None))
        except BaseException as error:
            results.extend((None, error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    result, error = results
    if error is not None:
        raise error
    return result


class VariableComponent(Component):
    """A replica's own value of a variable, in a `tf.Variable` of its own.

    Functions that are traced read and write it each time they run.
    """

    def __init__(self, value: Callable[[], Any], device: Device) -> None:
        def make() -> tf.Variable:
            return tf.Variable(value(), trainable=False)

        self._native = apart(make, device)

    def read(self) -> Any:
        return self._native.read_value()

    def write(self, value: Any) -> None:
        self._native.assign(tf.cast(value, self._native.dtype))


def is_metric_state(variable: Any) -> bool:
    """Whether only the primary holds a `keras.Variable`.

    Metrics are updated once, on gathered rows, so that states which are no
    sums come out right. TensorFlow would give each replica a state of its own
    and sum them when they are read.
    """
    return bool(variable.synchronization == "on_read")


class _Current(threading.local):
    # Scopes can be nested: what an inner one decided holds.
    makes_one_copy = False


_current = _Current()


def creates_mirrored(
    native: tf.distribute.Strategy, primary: Device
) -> contextlib.AbstractContextManager[Any]:
    """A scope where variables get a copy on each device of a strategy.

    It is not the strategy's own scope, in which models of other strategies,
    or of none, can't be read, called or trained.

    Args:
        native: The strategy.
        primary: The device of what has one copy only.
    """

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        # Somebody else's trace: our own make variables outside of it.
        if _current.makes_one_copy or not tf.executing_eagerly():
            return next_creator(**kwargs)
        if tf.distribute.get_strategy() is native:  # where replicas meet
            if kwargs.get("synchronization") is not _ON_READ:
                return next_creator(**kwargs)
            kwargs["synchronization"] = tf.VariableSynchronization.AUTO
            return apart(lambda: tf.Variable(**kwargs), primary)
        if kwargs.get("synchronization") is _ON_READ:
            kwargs["synchronization"] = tf.VariableSynchronization.AUTO
            _current.makes_one_copy = True
            try:
                with tf.device(native_name(primary)):
                    return next_creator(**kwargs)
            finally:
                _current.makes_one_copy = False
        with native.scope():
            return tf.Variable(**kwargs)

    scope: contextlib.AbstractContextManager[Any] = tf.variable_creator_scope(
        create
    )
    return scope


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """As `tf.init_scope`, and a trace in which variables are made counts.

    Else TensorFlow throws that trace away and makes it a second time. For what
    is made before a step's first operation: a loss that was scaled before its
    optimizer was built has the initial scale in it.
    """

    def unlifted(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        kwargs["experimental_enable_variable_lifting"] = False
        return next_creator(**kwargs)

    with tf.init_scope(), tf.variable_creator_scope(unlifted):
        yield


@functools.cache
def install_slots() -> None:
    """Makes optimizers treat variables as the strategy of these does.

    Slots are on the devices of the variables that they are for. Keras asks
    the strategy in whose native scope the optimizer was made.
    """
    optimizer = keras.optimizers.Optimizer
    original = optimizer.add_variable_from_reference

    @functools.wraps(original)
    def add_variable_from_reference(
        self: Any, reference_variable: Any, *args: Any, **kwargs: Any
    ) -> Any:
        def slot() -> Any:
            return original(self, reference_variable, *args, **kwargs)

        is_inside = tf.distribute.has_strategy()
        if is_inside and tf.distribute.get_replica_context() is not None:
            return slot()  # a native program's own replica
        reference = internals.native_variable(reference_variable)
        if update_internals.is_distributed(reference):
            native = reference.distribute_strategy
            internals.set_optimizer_strategy(self, native)
            with native.scope():
                return slot()
        if is_inside:
            native = tf.distribute.get_strategy()
            internals.set_optimizer_strategy(self, native)
            return slot()
        made = slot()
        copies = internals.native_variable(made)
        if update_internals.is_distributed(copies):  # of what has one copy only
            internals.set_optimizer_strategy(self, copies.distribute_strategy)
        return made

    original_build = optimizer.build

    @functools.wraps(original_build)
    def build(self: Any, variables: Any) -> Any:
        # Not all have slots, and each updates its variables by its strategy.
        for variable in variables:
            native = internals.native_variable(variable)
            if update_internals.is_distributed(native):
                internals.set_optimizer_strategy(
                    self, native.distribute_strategy
                )
                break
        return original_build(self, variables)

    optimizer.add_variable_from_reference = add_variable_from_reference
    optimizer.build = build
