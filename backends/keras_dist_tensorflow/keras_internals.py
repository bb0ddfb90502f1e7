"""The door to private names of Keras; its functions say what each is for."""

import contextlib
import threading
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_dist.plugins import Trainer
from keras_dist.plugins import draw_seed
from keras_dist.plugins import private

nn = private(
    "keras.src.backend.tensorflow.ops.nn", "keras.src.backend.tensorflow.nn"
)

_random = private("keras.src.backend.tensorflow.random")

for _name in (
    "keras.Layer._flatten_layers",
    "keras.src.backend.tensorflow.random._cast_seed",
    "keras.Model._symbolic_build",
    "keras.optimizers.LossScaleOptimizer._common_apply",
):
    private(_name)


def next_seed(seed: object) -> Any:
    """Returns what a draw of Keras gives TensorFlow for its `seed`."""
    return _random._cast_seed(draw_seed(seed))


def native_of(variable: keras.Variable) -> Any:
    """Returns a variable's `tf.Variable`, or `None` before it has one."""
    if not isinstance(variable, keras.Variable):
        return variable  # optimizers take a `tf.Variable` too
    return variable._value


def replace_native_variable(variable: keras.Variable, native: object) -> None:
    variable._value = native


def native_key(native: Any) -> Any:
    """Returns the key by which optimizers identify a `tf.Variable`."""
    return native._unique_id


def set_strategy(
    optimizer: keras.Optimizer, native: tf.distribute.Strategy
) -> None:
    optimizer._distribution_strategy = native


# What an optimizer knows of each variable, by the variable's key. Keras 3.16
# has the second in place of the third.
_BY_KEY = (
    "_trainable_variables_indices",
    "_weight_decay_by_var_key",
    "_exclude_from_weight_decay_cache",
)


def adopt_optimizer(
    optimizer: keras.Optimizer,
    native: tf.distribute.Strategy,
    renamed: Mapping[Any, Any],
) -> None:
    """Sets an optimizer's strategy and renames keys of its variables."""
    while optimizer is not None:
        known = vars(optimizer)
        set_strategy(optimizer, native)
        if renamed:
            for name in _BY_KEY:
                # A new dict: TensorFlow can't save a tracked one that was
                # cleared.
                if known.get(name):
                    by_key = {
                        renamed.get(key, key): value
                        for key, value in known[name].items()
                    }
                    setattr(optimizer, name, by_key)
            excluded = known.get("_exclude_from_weight_decay")
            if excluded:
                optimizer._exclude_from_weight_decay = {
                    renamed.get(key, key) for key in excluded
                }
        optimizer = known.get("inner_optimizer")


def set_native_strategy(model: keras.Model, strategy: object) -> None:
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
    """Returns whether calling the model would create no variable."""
    # A model without `call` of its own is never marked as built.
    without = (keras.Model.call, keras.Layer.call)
    return all(
        layer.built or type(layer).call in without
        for layer in model._flatten_layers()
    )


def compiled_parts_are_built(model: keras.Model) -> bool:
    """Returns whether the metrics and loss given to `compile` are built."""
    names = ("_compile_metrics", "_compile_loss")
    parts = [getattr(model, name, None) for name in names]
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


def build_compiled_parts(model: keras.Model, batch: object) -> None:
    model._symbolic_build(data_batch=batch)


class _Applying(threading.local):
    is_on = False


_applying = _Applying()


def install_applying(native: tf.distribute.Strategy) -> None:
    """Prepares a native strategy for updates inside of `applying`."""
    extended = native.extended
    use_merge_call = extended._use_merge_call
    update, colocate = extended._update, extended.colocate_vars_with

    def _use_merge_call() -> bool:
        return not _applying.is_on and use_merge_call()

    def _update(var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        if is_distributed(var):
            return update(var, fn, args, kwargs, group)
        with tf.device(var.device):  # its only copy
            return fn(var, *args, **kwargs)

    def colocate_vars_with(variable: keras.Variable) -> Any:
        if is_distributed(variable):
            return colocate(variable)
        return contextlib.nullcontext()

    extended._use_merge_call = _use_merge_call
    extended._update = _update
    extended.colocate_vars_with = colocate_vars_with


def is_distributed(native: object) -> bool:
    return isinstance(native, tf.distribute.DistributedValues)


@contextlib.contextmanager
def applying(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Makes `optimizer.apply` legal in cross-replica context."""
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales:
        # `object.__setattr__`: Keras' own would track the attribute.
        object.__setattr__(optimizer, "_tf_apply", optimizer._common_apply)
    _applying.is_on = True
    try:
        yield
    finally:
        _applying.is_on = False
        if scales:
            object.__delattr__(optimizer, "_tf_apply")
