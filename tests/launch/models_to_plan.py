"""Models that the tests of `keras-dist plan` name, good and bad."""

import threading

import keras
import numpy as np
from keras import Input
from keras import layers

import keras_dist

number = 3
threads = []


def compiled(model, loss="mse", optimizer="adam", **options):
    metrics = ["mae"] if loss else None
    model.compile(optimizer, loss, metrics=metrics, **options)
    return model


def of_layers(*stack, **options):
    return compiled(keras.Sequential(stack), **options)


def build(units=7, **options):
    first = [Input((5,)), layers.Dense(units), layers.BatchNormalization()]
    return of_layers(*first, layers.Dropout(0.5), layers.Dense(3), **options)


def here():
    threads.append(threading.current_thread())
    return build()


def huge():
    return build(units=10**12)


def momentum():
    return build(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))


def muon():
    return build(optimizer="muon")


def uncompiled():
    return keras.Sequential([Input((5,)), layers.Dense(7)])


def unbuilt():
    return keras.Sequential([layers.Dense(7)])


def wide(**options):
    first = [Input((256,)), layers.Dense(256), layers.BatchNormalization()]
    return of_layers(*first, layers.Dense(8), **options)


def paired():
    up = layers.Dense(256, activation="relu", name="up")
    return of_layers(Input((64,)), up, layers.Dense(64, name="down"))


def lamb():
    return wide(optimizer=keras.optimizers.Lamb())


def eager():
    return wide(run_eagerly=True)


def augmented():
    first = [Input((8, 8, 3)), layers.RandomRotation(0.1), layers.Flatten()]
    return of_layers(*first, layers.Dense(2))


def open_sizes():
    return of_layers(Input((None, 4)), layers.Dense(2))


def without_loss():
    regularizer = layers.ActivityRegularization(0.1)
    return of_layers(Input((3,)), layers.Dense(2), regularizer, loss=None)


def _two_outputs(inputs, joined, loss):
    classes = layers.Dense(5, activation="softmax", name="c")(joined)
    outputs = [classes, layers.Dense(2, name="d")(joined)]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", loss)
    return model


def named():
    inputs = Input((3,))
    sparse = keras.losses.SparseCategoricalCrossentropy(name="own")
    return _two_outputs(inputs, inputs, {"c": sparse, "d": "mse"})


def sparse():
    inputs = {"a": Input((3,), name="a"), "b": Input((2, 2), name="b")}
    flat = [inputs["a"], layers.Flatten()(inputs["b"])]
    losses = ["sparse_categorical_crossentropy", "mse"]
    return _two_outputs(inputs, layers.Concatenate()(flat), losses)


def text_inputs():
    inputs = Input((1,), dtype="string")
    hashed = layers.Lambda(lambda x: x, output_shape=(3,), dtype="int32")
    return compiled(keras.Model(inputs, layers.Dense(2)(hashed(inputs))))


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)


class Alone(Own):
    def call(self, x):
        y = super().call(x)
        self.add_loss(keras.ops.mean(y))
        return y


def alone():
    return compiled(Alone(), loss=None), np.ones((2, 6))


def without_sizes():
    return compiled(Own())


def with_data():
    return compiled(Own()), np.ones((2, 6)), np.ones((2, 3), "int64")


def wrong_labels():
    return compiled(Own()), np.ones((2, 6)), np.ones((2, 7))


def with_other_data():
    return Own(), {"a": np.ones((2, 5))}


def with_weights():
    return wide(), np.ones((2, 256)), np.ones((2, 8)), np.ones(2)


def too_much():
    return *with_weights(), None


def of_lists():
    return wide(), [[1.0] * 256], [[1.0] * 8]


def of_text():
    return wide(), np.array(["a", "b"]), np.ones((2, 8))


def measured():
    return build(), [[1.0] * 5], [1.0]


def talkative():
    print("building")
    model = wide()
    model.summary()
    return model


def predicted():
    model = wide()
    model.predict(np.ones((4, 256)), verbose=0)
    return model


def trained():
    model = wide()
    model.train_on_batch(np.ones((4, 256)), np.ones((4, 8)))
    return model


def own_strategy():
    with keras_dist.MirroredStrategy(["cpu:0"]).scope():
        return wide()


def text():
    return "model"


def failing():
    raise OSError("no such file")
