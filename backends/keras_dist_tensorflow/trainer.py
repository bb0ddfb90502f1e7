"""Keras' trainer: a stand-in for its strategy, and steps that build models."""

import contextlib
import functools
import weakref
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from keras_dist.plugins import Call
from keras_dist.plugins import FlightRecorder
from keras_dist.plugins import bound
from keras_dist_tensorflow import keras_internals
from keras_dist_tensorflow.tf_variables import outside_of_traces


class OneReplica:
    """Stand-in for a native strategy, so Keras' trainer sees one replica."""

    num_replicas_in_sync = 1
    cluster_resolver = None

    @property
    def extended(self) -> Any:
        """The methods that a library asks for where it writes files."""
        return tf.distribute.get_strategy().extended

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: object = None,
    ) -> Any:
        return fn(*args, **(kwargs or {}))

    def experimental_distribute_dataset(
        self, dataset: object, options: object = None
    ) -> Any:
        return dataset

    def experimental_local_results(self, value: object) -> tuple[Any, ...]:
        return (value,)

    def reduce(
        self, reduce_op: object, value: object, axis: object = None
    ) -> Any:
        return value

    def gather(self, value: object, axis: int) -> Any:
        return value

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()  # each model enters its own scope


# By plain model, for each of its functions: ids of the `tf.Variable`s that it
# was made for. A trace keeps those that it captured.
_traced: weakref.WeakKeyDictionary[keras.Model, dict[str, list[int]]] = (
    weakref.WeakKeyDictionary()
)


def hook_make_function(
    name: str,
    original: Callable[..., Any],
    self: keras.Model,
    force: bool = False,
) -> Any:
    """Stands for the method that makes the function of `fit` or a relative.

    A model of no strategy has it made again once its variables were moved, by a
    strategy that it shares layers with.
    """
    if bound(self) is not None:
        return original(self, force)
    owned = [v for v in self.variables if "distribute_strategy" in vars(v)]
    if owned:
        now = [id(keras_internals.native_of(v)) for v in owned]
        made_for = _traced.setdefault(self, {})
        force = force or made_for.get(name) != now
        made_for[name] = now
    return original(self, force)


def recorded(
    model: keras.Model, recorder: FlightRecorder
) -> dict[str, Callable[..., Any]]:
    """Returns methods that make functions which record each of their calls."""

    def maker(name: str) -> Callable[..., Any]:
        method, attribute = f"make_{name}_function", f"{name}_function"
        original = getattr(type(model), method)
        call = Call(f"a batch in `{name}_step`", f"a batch in `{name}_step`")

        def make(force: bool = False) -> Any:
            before = getattr(model, attribute)
            original(model, force)
            function = getattr(model, attribute)
            if function is not before:

                @functools.wraps(function)
                def noted(*args: Any) -> Any:
                    entry = recorder.note(call, is_sure=False)
                    try:
                        return function(*args)
                    except (StopIteration, tf.errors.OutOfRangeError):
                        recorder.take_back(entry)  # there was no batch
                        raise

                setattr(model, attribute, noted)
            return getattr(model, attribute)

        return make

    names = ("train", "test", "predict")
    return {f"make_{name}_function": maker(name) for name in names}


def built_first(
    model: keras.Model, name: str, step: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    def built(data: object) -> Any:
        build(model, name, data)
        return step(data)

    built.__name__ = name
    return built


def build(model: keras.Model, name: str, data: object) -> None:
    """Builds a model from a batch's shapes, before its step `name`."""
    # Drawing a batch of the user's data first would change a shuffled order.
    layers = not keras_internals.layers_are_built(model)
    compiled = name != "predict_step" and (
        not keras_internals.compiled_parts_are_built(model)
    )
    if not layers and not compiled:
        return
    link = bound(model)
    assert link is not None
    # A user's own step may call the model, its loss and its metrics in other
    # ways than Keras does, or not at all: errors of building are ignored. In
    # Keras' own step an error of the user's layers is a `RuntimeError` here,
    # and the step raises the original one.
    is_own = getattr(type(model), name) is not getattr(keras.Model, name)
    tolerated = contextlib.suppress(Exception if is_own else RuntimeError)
    batch = tree.map_structure(_symbolic, data)
    # The trace that is under way is made with the new variables.
    function = name.replace("_step", "_function")
    traced = getattr(model, function, None)
    # Variables outlive the step's graph: they are made outside of it.
    with outside_of_traces():
        if layers:
            with tolerated, link.strategy.scope():
                model(keras.utils.unpack_x_y_sample_weight(batch)[0])
        if compiled:
            with tolerated, link.strategy.scope():
                keras_internals.build_compiled_parts(model, batch)
        link.prepare()
    setattr(model, function, traced)


def _symbolic(leaf: Any) -> Any:
    if leaf is None:
        return None
    if not hasattr(leaf, "shape"):
        leaf = tf.convert_to_tensor(leaf)
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    return keras.KerasTensor(tuple(leaf.shape), dtype)
