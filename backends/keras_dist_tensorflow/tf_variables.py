"""`tf.Variable`s: their devices, copies and moves."""

import contextlib
import threading
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import tensorflow as tf

from keras_dist.plugins import Component
from keras_dist.plugins import Device
from keras_dist.plugins import all_optimizers
from keras_dist.plugins import parse_device
from keras_dist.plugins import replaced
from keras_dist_tensorflow import keras_internals


def device_name(device: Device) -> str:
    return f"/device:{device.type.upper()}:{device.index}"


def on_device(device: Device) -> Any:
    """Returns a context in which TensorFlow computes on a device."""
    return tf.device(device_name(device))


def components(native: object) -> tuple[Any, ...]:
    """Returns a variable's copies, primary first, or a plain one in a tuple."""
    if isinstance(native, tf.distribute.DistributedValues):
        return tuple(native.values)
    return (native,)


def copy_of(native: object, index: int) -> Any:
    """Returns a replica's copy of a variable, or its only one."""
    copies = components(native)
    return copies[index % len(copies)]


def devices_of(native: object) -> tuple[Device, ...]:
    return tuple(parse_device(copy.device) for copy in components(native))


def copied(
    native: Any,
    synchronization: Any = tf.VariableSynchronization.AUTO,
) -> Any:
    """Makes a `tf.Variable` with another's value, in the open scopes."""
    return tf.Variable(
        components(native)[0].read_value(),
        trainable=native.trainable,
        dtype=native.dtype,
        name=native.name.split(":")[0].split("/")[-1],
        aggregation=native.aggregation,
        synchronization=synchronization,
    )


class _Creation(threading.local):
    # True while strategies' scopes must leave new variables alone.
    has_one_copy = False


creation = _Creation()


def one_copy() -> contextlib.AbstractContextManager[None]:
    """Makes variables with one copy, whatever scopes are open."""
    return replaced(creation, has_one_copy=True)


class Replacements:
    """Replaced `tf.Variable`s; updates models and optimizers that hold them."""

    so_far = 0  # moves in this process
    # The handles of replaced variables, by id.
    gone: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        # Keys of replaced variables, and of those in their place.
        self._renamed: dict[Any, Any] = {}
        self._num_moves = 0
        # For each model and optimizer, the number of moves that it follows.
        self._moves_followed: weakref.WeakKeyDictionary[Any, int] = (
            weakref.WeakKeyDictionary()
        )

    def move(self, variable: keras.Variable, to: object) -> None:
        Replacements.so_far += 1
        self._num_moves += 1
        old = keras_internals.native_of(variable)
        Replacements.gone.update(
            (id(c.handle), c.handle) for c in components(old)
        )
        key = keras_internals.native_key(old)
        self._renamed[key] = keras_internals.native_key(to)
        weakref.finalize(variable, self._renamed.pop, key, None).atexit = False
        keras_internals.replace_native_variable(variable, to)

    def follow(
        self, model: keras.Model, native: tf.distribute.Strategy
    ) -> None:
        """Updates a model's compiled steps and its optimizers after moves."""
        optimizer = getattr(model, "optimizer", None)
        optimizers = [] if optimizer is None else [optimizer]
        if self._is_news(model):
            keras_internals.forget_functions(model)
            optimizers = list(all_optimizers(model).values())
        for optimizer in optimizers:
            self.adopt(optimizer, native)

    def adopt(self, optimizer: keras.Optimizer, native: object) -> None:
        """Gives an optimizer its strategy, and new keys after moves."""
        renamed = self._renamed if self._is_news(optimizer) else {}
        keras_internals.adopt_optimizer(optimizer, native, renamed)

    def _is_news(self, owner: object) -> bool:
        if self._moves_followed.get(owner, 0) == self._num_moves:
            return False
        self._moves_followed[owner] = self._num_moves
        return True


def apart(fn: Callable[[], Any], device: Device) -> Any:
    """Calls `fn` eagerly on a device, in a thread without strategy or trace."""

    def call() -> Any:
        with on_device(device):
            return fn()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


class NativeComponent(Component):
    """A replica's own value in a `tf.Variable`, which traces use."""

    def __init__(self, value: Callable[[], Any], device: Device) -> None:
        def make() -> tf.Variable:
            return tf.Variable(value(), trainable=False)

        self._native = apart(make, device)

    def read(self) -> Any:
        return self._native.read_value()

    def write(self, value: object) -> None:
        self._native.assign(tf.cast(value, self._native.dtype))


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """Opens `tf.init_scope`; variables made inside cause no second trace."""

    # Only before a step's first operation: in a trace that is kept, a loss
    # scaled before its optimizer was built has the initial scale in it.
    def unlifted(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        kwargs["experimental_enable_variable_lifting"] = False
        return next_creator(**kwargs)

    with tf.init_scope(), tf.variable_creator_scope(unlifted):
        yield
