"""Values of workers that are apart by more than rounding are an error."""

import keras
import numpy as np
import pytest

from keras_dist.errors import ReplicaDivergenceError
from keras_dist.fit.workers import drift

NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("own", "chiefs", "apart"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0001], [1.0, 2.0], 0.0),
        ([1.0, 2.1], [1.0, 2.0], 0.1),
        ([NAN, 2.0], [1.0, 2.0], INF),
        ([1.0, 2.0], [NAN, 2.0], INF),
        ([1.0, 2.0], [INF, 2.0], INF),
        ([-INF, 2.0], [INF, 2.0], INF),
        ([NAN, INF], [NAN, INF], 0.0),
        ([INF, 2.1], [INF, 2.0], 0.1),
        ([], [], 0.0),
    ],
)
def test_distances(own, chiefs, apart):
    own, chiefs = (np.array(each, "float32") for each in (own, chiefs))
    assert drift._distance(own, chiefs) == pytest.approx(apart, rel=1e-4)


def model_with(values):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.set_weights([np.array(values)[:, None], np.zeros(1)])
    return model


@pytest.mark.parametrize(
    ("own", "chiefs", "is_apart"),
    [
        ([1.0, 2.0], [1.0, 2.0], False),
        ([1.0, 2.1], [1.0, 2.0], True),
        ([1.0, NAN], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, NAN], True),
        ([1.0, 2.0], [1.0, INF], True),
        ([1.0, NAN], [1.0, NAN], False),
        ([1.0, INF], [1.0, INF], False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*overflow", "ignore:.*invalid value")
def test_what_the_chief_has_saved(own, chiefs, is_apart):
    model = model_with(own)
    digests = [drift.digest_of(each) for each in (model, model_with(chiefs))]
    if not is_apart:
        drift.check_digest(model, *digests)
        return
    with pytest.raises(ReplicaDivergenceError, match="kernel"):
        drift.check_digest(model, *digests)
