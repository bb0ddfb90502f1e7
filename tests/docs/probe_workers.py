"""The probes of README's table that need processes of their own."""

import functools

import numpy as np

import keras_dist


@functools.cache
def _on_two_workers():
    """The losses on each worker, and whether 16 bits were refused."""

    def train():
        import keras
        import numpy as np

        import keras_dist

        options = keras_dist.experimental.CommunicationOptions(dtype="float16")
        refused = False
        try:
            strategy = keras_dist.MultiWorkerMirroredStrategy(
                communication_options=options
            )
        except keras_dist.ClusterError:
            refused = True
            strategy = keras_dist.MultiWorkerMirroredStrategy()
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential(
                [keras.layers.Input((2,)), keras.layers.Dense(1)]
            )
            model.compile("sgd", "mse", jit_compile=False)
        x = np.ones((5, 2), "float32")
        history = model.fit(x, x[:, :1], batch_size=5, epochs=2, verbose=0)
        return history.history["loss"], refused

    return keras_dist.launch(train, workers=2, devices=1)


def trains_on_workers():
    """Two processes train together, on an odd number of rows."""
    (first, _), (second, _) = _on_two_workers()
    assert first == second
    assert first[1] < first[0]
    return "yes"


def trains_on_logical_devices():
    """Two processes with a replica of two devices each, or it is refused."""
    layouts = {".*/kernel": ("logical",)}
    return _trains(2, logical_devices=2, layout_map=layouts)


def trains_with_parts(what):
    """Two processes that keep parts of something, or it is refused."""
    return _trains(1, **{what: "sharded"})


def _trains(devices, **options):
    try:
        keras_dist.MultiWorkerMirroredStrategy(**options)
    except ValueError as error:
        # One process keeps no parts, and says how to start several.
        if "keras-dist run --workers" not in str(error):
            return "no: an error says so"

    def train(is_plain=False):
        import contextlib

        import keras
        import numpy as np

        import keras_dist

        scope = contextlib.nullcontext()
        if not is_plain:
            scope = keras_dist.MultiWorkerMirroredStrategy(**options).scope()
        keras.utils.set_random_seed(0)
        with scope:
            model = keras.Sequential(
                [
                    keras.layers.Input((2,)),
                    keras.layers.Dense(400, activation="tanh"),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dense(4),
                    keras.layers.Dense(1),
                ]
            )
            model.compile("sgd", "mse")
        x = np.linspace(-1.0, 1.0, 22, dtype="float32").reshape(11, 2)
        y = x.sum(axis=1, keepdims=True) ** 2
        model.fit(x, y, batch_size=11, epochs=2, shuffle=False, verbose=0)
        return [weight.tolist() for weight in model.get_weights()]

    expected = train(is_plain=True)
    for found in keras_dist.launch(train, workers=2, devices=devices):
        for own, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, theirs, rtol=1e-4, atol=1e-6)
    return "yes"


def sends_gradients_in_16_bits():
    """Gradients go between workers in half of the bytes, or it is refused."""
    refused = {refused for _, refused in _on_two_workers()}
    return {"{True}": "no: an error says so", "{False}": "yes"}[str(refused)]
