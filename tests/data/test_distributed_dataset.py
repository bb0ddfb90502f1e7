"""A distributed dataset gives `fit` the numbers of the data it is made of."""

import keras
import numpy as np
import pytest

from parity.harness import JIT
from parity.harness import strategy as mirrored
from parity.harness import to_numpy


def _batches():
    rng = np.random.default_rng(0)
    sizes = (7, 7, 3, 1)
    return [
        (
            rng.normal(size=(n, 4)).astype("float32"),
            rng.normal(size=(n, 1)).astype("float32"),
        )
        for n in sizes
    ]


def _model():
    model = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)]
    )
    model.compile(
        keras.optimizers.Adam(0.1), "mse", metrics=["mae"], jit_compile=JIT
    )
    return model


def _outcome(model, data):
    history = model.fit(
        data, epochs=2, validation_data=data, shuffle=False, verbose=0
    )
    logs = model.evaluate(data, verbose=0, return_dict=True)
    predictions = model.predict(data, verbose=0)
    return [
        *map(to_numpy, model.get_weights()),
        *(np.asarray(v) for _, v in sorted(history.history.items())),
        *(np.asarray(v) for _, v in sorted(logs.items())),
        predictions,
    ]


class Plain(keras.utils.PyDataset):
    """The same batches, as plain Keras reads them."""

    def __len__(self):
        return len(_batches())

    def __getitem__(self, index):
        return _batches()[index]


@pytest.fixture(scope="module")
def expected():
    keras.utils.set_random_seed(1)
    return _outcome(_model(), Plain())


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("made", ["dataset", "function"])
def test_fit_on_a_distributed_dataset(num_replicas, made, expected):
    strategy = mirrored(num_replicas)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = _model()
    if made == "dataset":
        data = strategy.experimental_distribute_dataset(_batches())
    else:
        # Each replica's part is an element of its own.
        cuts = [
            (x[i::num_replicas], y[i::num_replicas])
            for x, y in _batches()
            for i in range(num_replicas)
        ]
        data = strategy.distribute_datasets_from_function(lambda context: cuts)
    got = _outcome(model, data)
    if made == "function":  # rows come in another order
        got, expected = got[:-1], expected[:-1]
    for ours, plain in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)
