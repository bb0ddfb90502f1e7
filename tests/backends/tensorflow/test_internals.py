"""The private names that this backend uses are where it looks for them.

A failure here means that Keras or TensorFlow moved something: the functions of
`keras_internals.py` and `runtime_internals.py` of `keras_dist_tensorflow` say
what each is for.
"""

import inspect

import keras
import pytest
import tensorflow as tf
from tensorflow.python import pywrap_tfe

from keras_dist.internals.keras_internals import Trainer
from keras_dist_tensorflow.keras_internals import nn
from keras_dist_tensorflow.trainer import OneReplica


def make_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.compile(optimizer, "mse", metrics=["mae"])
    optimizer.build(model.trainable_variables)
    return model


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (
            lambda model: model,
            [
                "_distribute_strategy",
                "_symbolic_build",
                "_maybe_symbolic_build",
                "_compile_metrics",
                "_compile_loss",
                "_flatten_layers",
                "train_function",
                "test_function",
                "predict_function",
            ],
        ),
        (
            lambda model: model._compile_metrics,
            ["_user_metrics", "_user_weighted_metrics", "built"],
        ),
        (
            lambda model: model.optimizer,
            [
                "_distribution_strategy",
                "_trainable_variables_indices",
                "_exclude_from_weight_decay",
                "add_variable_from_reference",
            ],
        ),
        (
            lambda model: keras.optimizers.LossScaleOptimizer,
            ["_tf_apply", "_common_apply"],
        ),
        (lambda model: nn, ["conv"]),
        (lambda model: model.weights[0], ["_value"]),
        (lambda model: model.weights[0]._value, ["_unique_id"]),
        (
            lambda model: pywrap_tfe,
            ["TFE_Py_TapeSetIsStopped"],
        ),
        (
            lambda model: (
                tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).extended
            ),
            ["_use_merge_call", "_update", "colocate_vars_with"],
        ),
    ],
    ids=[
        "model",
        "metrics",
        "optimizer",
        "loss_scale",
        "convolution",
        "variable",
        "native",
        "tapes",
        "strategy",
    ],
)
def test_private_names(owner, names):
    owner = owner(make_model())
    missing = [name for name in names if not hasattr(owner, name)]
    assert not missing


def test_optimizers_know_variables_by_their_native_name():
    model = make_model()
    known = model.optimizer._trainable_variables_indices
    names = {v._value._unique_id: i for i, v in enumerate(model.weights)}
    assert dict(known) == names


def test_the_trainer_asks_one_replica_for_what_we_have():
    """Every method that Keras' trainer calls on a native strategy."""
    source = inspect.getsource(inspect.getmodule(Trainer))
    asked = {
        line.split("distribute_strategy.")[1].split("(")[0]
        for line in source.splitlines()
        if "distribute_strategy." in line and "tf.distribute" not in line
    }
    assert asked >= {"run", "reduce", "scope"}
    assert asked <= set(dir(OneReplica)), asked
