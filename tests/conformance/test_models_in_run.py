"""Models and metrics do in `run` what they do in `fit`, and beside it."""

import keras
import numpy as np

from conformance.contract import contract
from conformance.helpers import numbers
from conformance.helpers import per_replica
from conformance.helpers import tensor


@contract(215, native=False)
def test_the_first_call_may_have_other_rows_on_each_replica(mirrored):
    with mirrored.scope():
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    x = per_replica(mirrored, lambda i: tensor(np.ones((i + 1, 2))))
    outputs = mirrored.run(lambda x: model(x), (x,))
    assert len(model.weights) == 4
    first = numbers(outputs)[0][0]
    for index, rows in enumerate(numbers(outputs)):
        np.testing.assert_allclose(rows, [first] * (index + 1), rtol=1e-6)


@contract(212, native=False)
def test_replicas_go_on_from_what_fit_has_counted(mirrored):
    """Replicas forget what they had of a state that `fit` has changed."""
    count = mirrored.num_replicas_in_sync
    with mirrored.scope():
        metric = keras.metrics.MeanAbsoluteError()
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[metric])
    x = np.ones((5, 2), "float32")

    def add():
        mirrored.run(lambda: metric.update_state([[0.0]], [[1.0]]))
        return float(keras.ops.convert_to_numpy(metric.count))

    assert add() == count
    for _ in range(2):
        model.fit(x, x[:, :1], verbose=0)  # resets the metrics of the model
        assert add() == 5 + count
    metric.reset_state()
    assert (add(), add()) == (count, 2 * count)
