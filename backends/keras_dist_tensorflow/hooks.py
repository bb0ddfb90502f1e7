"""The table of what is replaced in TensorFlow, and in Keras for it, and why.

It is in place as long as that of the front end, `keras_dist/fit/hooks.py`.
"""

from collections.abc import Iterator
from functools import partial

import keras
import tensorflow as tf

from keras_dist.plugins import WITH_APPLY
from keras_dist.plugins import Hook
from keras_dist.plugins import Trainer
from keras_dist.plugins import as_hook
from keras_dist_tensorflow import atomic
from keras_dist_tensorflow import central
from keras_dist_tensorflow import mirrored
from keras_dist_tensorflow import runtime_internals
from keras_dist_tensorflow import trainer
from keras_dist_tensorflow.keras_internals import nn
from keras_dist_tensorflow.replica import hook_custom_gradient
from keras_dist_tensorflow.replica import hook_gradient
from keras_dist_tensorflow.runtime_internals import custom_gradient


def table() -> Iterator[Hook]:
    """Returns the rows, by what they are for."""
    optimizer = keras.optimizers.Optimizer
    why = "a plain model is traced anew once its variables were moved"
    for name in ("train", "test", "predict"):
        make = as_hook(partial(trainer.hook_make_function, name))
        yield Hook(Trainer, f"make_{name}_function", make, why)
    why = "slots are where their variables are"
    name = "add_variable_from_reference"
    yield Hook(optimizer, name, mirrored.hook_slot, why)
    yield Hook(optimizer, "build", mirrored.hook_build, why)
    why = "a step that fails assigns nothing"
    for cls in WITH_APPLY:
        yield Hook(cls, "apply", atomic.hook_apply, why)
    why = "gradients of sums over rows are those of one device"
    yield Hook(tf.GradientTape, "gradient", hook_gradient, why)
    why = "a gradient that a user defines sees that of one device"
    for name in ("_eager_mode_decorator", "_graph_mode_decorator"):
        yield Hook(custom_gradient, name, hook_custom_gradient, why)
    why = "XLA finds the kernel of a convolution on its device"
    yield Hook(nn, "conv", central.hook_convolution, why)
    why = "a mirrored variable is a Python number where one is wanted"
    for kind in (complex, float, int):
        name = f"__{kind.__name__}__"
        make = partial(runtime_internals.hook_conversion, kind)
        yield Hook(runtime_internals.DistributedVariable, name, make, why)
    why = "advice on a strategy of TensorFlow's is not for users of ours"
    make = runtime_internals.hook_filter
    yield Hook(tf.get_logger(), "filter", make, why)
