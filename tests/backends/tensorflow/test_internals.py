"""Keras' optimizers and trainer ask a strategy for what ours have.

A failure here means that Keras or TensorFlow moved something: the functions of
`keras_internals.py` and `runtime_internals.py` of `keras_dist_tensorflow` say
what each is for.
"""

import inspect

import keras

from keras_dist.internals.keras_internals import Trainer
from keras_dist_tensorflow.trainer import OneReplica


def make_model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.compile(optimizer, "mse", metrics=["mae"])
    optimizer.build(model.trainable_variables)
    return model


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
