"""What Keras' trainer sees of replicas: nothing."""

import contextlib
import functools
import weakref
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from keras_dist.fit.binding import binding_of
from keras_dist.internals.keras_internals import Trainer
from keras_dist_tensorflow import internals
from keras_dist_tensorflow.variables import outside_of_traces


class OneReplica:
    """Stands for a native strategy in Keras' trainer, with one replica.

    The data pipeline, the loop and the callbacks see global batches only.
    """

    num_replicas_in_sync = 1

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Calls `fn`."""
        return fn(*args, **(kwargs or {}))

    def experimental_distribute_dataset(
        self, dataset: Any, options: Any = None
    ) -> Any:
        """The dataset itself."""
        return dataset

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The value, as one of one."""
        return (value,)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """The value itself."""
        return value

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Changes nothing: models know their scope."""
        return contextlib.nullcontext()


@functools.cache
def install_plain_models() -> None:
    """Tells models of no strategy that share variables with one that has."""
    for name in ("train", "test", "predict"):
        method = f"make_{name}_function"
        original = getattr(Trainer, method)
        setattr(Trainer, method, _knowing_its_variables(original, name))


def _knowing_its_variables(
    original: Callable[..., Any], name: str
) -> Callable[..., Any]:
    traced: weakref.WeakKeyDictionary[keras.Model, list[int]] = (
        weakref.WeakKeyDictionary()
    )

    @functools.wraps(original)
    def make(self: keras.Model, force: bool = False) -> Any:
        if binding_of(self) is None:
            # What was traced with variables that moved would keep them.
            now = [id(internals.native_variable(v)) for v in self.variables]
            force = force or traced.get(self, now) != now
            traced[self] = now
        return original(self, force)

    return make


def built_first(
    model: keras.Model, name: str, step: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """A step that builds the model from the shapes of its first batch.

    That is where Keras builds on TensorFlow, and it draws no batch of its own
    from the user's data, which would change a shuffled order.

    Args:
        model: A `keras.Model`.
        name: String, `"train_step"` or another one.
        step: Callable that takes a global batch.
    """

    def built(data: Any) -> Any:
        _build(model, name, data)
        return step(data)

    built.__name__ = name
    return built


def _build(model: keras.Model, name: str, data: Any) -> None:
    layers = not internals.layers_are_built(model)
    compiled = name != "predict_step" and (
        not internals.compiled_parts_are_built(model)
    )
    if not layers and not compiled:
        return
    binding = binding_of(model)
    assert binding is not None
    # A user's own step may call the model, its loss and its metrics in other
    # ways than Keras does, or not at all. And Keras hides an error of theirs
    # in a `RuntimeError`, which the step itself will raise as it is.
    is_own = getattr(type(model), name) is not getattr(keras.Model, name)
    tolerated = contextlib.suppress(Exception if is_own else RuntimeError)
    batch = tree.map_structure(_symbolic, data)
    # Out of the step's graph: variables outlive it.
    with outside_of_traces():
        if layers:
            with tolerated, binding.strategy.scope():
                model(keras.utils.unpack_x_y_sample_weight(batch)[0])
        if compiled:
            with tolerated:
                internals.build_compiled_parts(model, batch)
        binding.claim()
        binding.strategy.executor.prepare(model)


def _symbolic(leaf: Any) -> Any:
    if leaf is None:
        return None
    if not hasattr(leaf, "shape"):
        leaf = tf.convert_to_tensor(leaf)
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    return keras.KerasTensor(tuple(leaf.shape), dtype)
