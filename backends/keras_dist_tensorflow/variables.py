"""Creation of variables on the plan's devices, and moves to these devices."""

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
from keras_dist_tensorflow import keras_internals
from keras_dist_tensorflow.keras_internals import adopt_optimizer
from keras_dist_tensorflow.keras_internals import forget_functions
from keras_dist_tensorflow.keras_internals import is_distributed
from keras_dist_tensorflow.keras_internals import native_variable
from keras_dist_tensorflow.keras_internals import replace_native_variable
from keras_dist_tensorflow.keras_internals import set_optimizer_strategy

_ON_READ = tf.VariableSynchronization.ON_READ


def native_name(device: Device) -> str:
    """Returns TensorFlow's name of a device."""
    return f"/device:{device.type.upper()}:{device.index}"


def components(native: Any) -> tuple[Any, ...]:
    """Returns a variable's copies, primary first, or a plain one in a tuple."""
    if isinstance(native, tf.distribute.DistributedValues):
        return tuple(native.values)
    return (native,)


def devices_of(native: Any) -> tuple[Device, ...]:
    """Returns the devices that hold a copy of a `tf.Variable`."""
    return tuple(parse_device(copy.device) for copy in components(native))


def device_of(tensor: Any) -> Device | None:
    """Returns a tensor's device, or `None` if it has none, as in a trace."""
    if not isinstance(tensor, tf.Tensor) or not tensor.device:
        return None
    return parse_device(tensor.device)


def copied(
    native: Any,
    synchronization: Any = tf.VariableSynchronization.AUTO,
) -> Any:
    """Makes a new `tf.Variable` with the value of another.

    The open device and creator scopes decide where.
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
    """Returns the number of `tf.Variable`s replaced so far in the process."""
    return _moves_so_far


class Moves:
    """Replaced `tf.Variable`s, and the models and optimizers that follow."""

    def __init__(self) -> None:
        self._renamed: dict[Any, Any] = {}
        # For each model and optimizer, the number of moves that it follows.
        self._told: weakref.WeakKeyDictionary[Any, int] = (
            weakref.WeakKeyDictionary()
        )

    def move(self, variable: keras.Variable, to: Any) -> None:
        """Replaces the `tf.Variable` of a `keras.Variable`."""
        global _moves_so_far
        _moves_so_far += 1
        old = native_variable(variable)
        self._renamed[keras_internals.native_key(old)] = (
            keras_internals.native_key(to)
        )
        replace_native_variable(variable, to)

    def follow(
        self, model: keras.Model, native: tf.distribute.Strategy
    ) -> None:
        """Updates a model's compiled steps and its optimizer after moves.

        `native` is the strategy that updates the model's variables.
        """
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None:
            renamed = self._renamed if self._is_news(optimizer) else {}
            adopt_optimizer(optimizer, native, renamed)
        if self._is_news(model):
            forget_functions(model)

    def _is_news(self, owner: Any) -> bool:
        count = len(self._renamed)
        if self._told.get(owner, 0) == count:
            return False
        self._told[owner] = count
        return True


def default_device() -> str:
    """Returns the name of the device where this thread makes tensors."""
    with tf.init_scope():
        device: str = tf.constant(0.0).device
    return device


def put(value: Any, device: Device) -> Any:
    """Copies a value to a device, as a tensor."""
    with tf.device(native_name(device)):
        return tf.identity(ops.convert_to_tensor(value))


def is_native(value: Any) -> bool:
    """Returns whether a value is a `tf.Variable`, not a `keras.Variable`."""
    return isinstance(value, tf.Variable)


def snapshot(value: Any, index: int) -> Any:
    """Replaces a `tf.Variable` with its current value on replica `index`.

    Anything else is returned as it is.
    """
    if not is_native(value):
        return value
    copies = components(value)
    own = copies[index % len(copies)]
    # Without this, the value is read to the current device.
    with tf.device(own.device):
        return own.read_value()


def apart(fn: Callable[[], Any], device: Device) -> Any:
    """Calls `fn` eagerly on a device, under no strategy and in no trace.

    A new thread starts without either; there is no other way out of a native
    replica's context.
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


class NativeComponent(Component):
    """One replica's value of a variable, kept in a plain `tf.Variable`.

    So traced functions read and write it each time they run.
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
    """Returns whether a variable is a metric's state, kept on the primary.

    Metrics are updated once, on gathered rows, which is right for states that
    are no sums too. TensorFlow would give each replica a state of its own and
    sum the states when they are read.
    """
    return bool(variable.synchronization == "on_read")


class _Current(threading.local):
    # True while a scope makes a variable with one copy: scopes around it must
    # not give it more.
    makes_one_copy = False


_current = _Current()


def creates_mirrored(
    native: tf.distribute.Strategy, primary: Device
) -> contextlib.AbstractContextManager[Any]:
    """Returns a scope whose variables have a copy on each device of a strategy.

    Metric states have one copy, on `primary`. It is not the strategy's own
    scope, because models of other strategies, or of none, can't be read,
    called or trained in that.
    """

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        # In a trace: ours make their variables outside of it, so this one is
        # the user's.
        if _current.makes_one_copy or not tf.executing_eagerly():
            return next_creator(**kwargs)
        if tf.distribute.get_strategy() is native:  # in a meeting
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
    """Opens `tf.init_scope`, without a second trace for variables made in it.

    TensorFlow traces a function twice if the first trace made variables. Use
    this before a step's first operation only: in a trace that is kept, a loss
    scaled before its optimizer was built has the initial scale in it.
    """

    def unlifted(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        kwargs["experimental_enable_variable_lifting"] = False
        return next_creator(**kwargs)

    with tf.init_scope(), tf.variable_creator_scope(unlifted):
        yield


@functools.cache
def install_slots() -> None:
    """Makes optimizers use the native strategy that has their variables.

    Slots are made on the devices of their variables. Keras itself uses the
    strategy in whose native scope the optimizer was made.
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
            return slot()  # a replica of the user's own tf.distribute program
        reference = native_variable(reference_variable)
        if is_distributed(reference):
            native = reference.distribute_strategy
            set_optimizer_strategy(self, native)
            with native.scope():
                return slot()
        if is_inside:
            native = tf.distribute.get_strategy()
            set_optimizer_strategy(self, native)
            return slot()
        made = slot()
        copies = native_variable(made)
        # The slot has copies, though the variable has one.
        if is_distributed(copies):
            set_optimizer_strategy(self, copies.distribute_strategy)
        return made

    original_build = optimizer.build

    @functools.wraps(original_build)
    def build(self: Any, variables: Any) -> Any:
        # Not every optimizer has slots, but each has to know its strategy.
        for variable in variables:
            native = native_variable(variable)
            if is_distributed(native):
                set_optimizer_strategy(self, native.distribute_strategy)
                break
        return original_build(self, variables)

    optimizer.add_variable_from_reference = add_variable_from_reference
    optimizer.build = build
