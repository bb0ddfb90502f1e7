"""A strategy or value that is used wrongly says what to write instead."""

import pickle

import keras
import numpy as np
import pytest

import keras_dist
from errors.helpers import KINDS
from errors.helpers import each_kind

MANY = "MultiWorkerMirroredStrategy"


@each_kind
def test_a_strategy_is_neither_pickled_nor_a_context(kind):
    strategy = KINDS[kind]()
    with pytest.raises(
        TypeError, match="(?s)can't be pickled.*load_model"
    ) as info:
        pickle.dumps(strategy)
    assert repr(strategy) in str(info.value)
    # Nor is a scope that is not called.
    for thing in (strategy, strategy.scope):
        match = r"with strategy\.scope\(\):"
        with pytest.raises(TypeError, match=match), thing:
            pass
    assert not keras_dist.has_strategy()


@pytest.mark.parametrize(
    "name",
    [
        "MirroredStrategy",
        "CentralStorageStrategy",
        "MultiWorkerMirroredStrategy",
    ],
)
def test_a_number_of_devices_is_no_argument(name):
    with pytest.raises(
        TypeError, match=r"(?s)num_devices.*\[\"gpu:0\", \"gpu:1\"\]"
    ) as info:
        getattr(keras_dist, name)(num_devices=2)
    assert name in str(info.value)
    with pytest.raises(
        TypeError, match=r"(?s)'device'.*OneDeviceStrategy\(device"
    ):
        keras_dist.OneDeviceStrategy()


OPERATIONS = {
    "float": float,
    "int": int,
    "bool": bool,
    "add": lambda x: x + 1,
    "radd": lambda x: 1 + x,
    "numpy radd": lambda x: np.float32(1) + x,
    "mul": lambda x: x * 2,
    "sub": lambda x: x - 1,
    "truediv": lambda x: x / 2,
    "neg": lambda x: -x,
    "abs": abs,
    "less": lambda x: x < 1,
    "round": round,
    "item": lambda x: x[0],
    "len": len,
    "iteration": list,
    "asarray": np.asarray,
    "format": lambda x: f"{x:.2f}",
}


OF_CONTAINERS = {"bool", "len", "iteration", "item", "format"}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_per_replica_value_is_no_number(name, compiled):
    strategy = KINDS["mirrored"]()
    if keras.backend.backend() == "tensorflow" and name in OF_CONTAINERS:
        # A native value, of which native programs ask these.
        result = keras_dist.PerReplica([1.0, 2.0])
        with pytest.raises(TypeError, match="`strategy.reduce`"):
            OPERATIONS[name](result)
        return

    def fn(x):
        return x * 2.0

    value = strategy.experimental_distribute_values_from_function(
        lambda context: np.ones((2,), "float32")
    )
    fn = keras_dist.function(fn) if compiled else fn
    result = strategy.run(fn, args=(value,))
    with pytest.raises(
        (TypeError, ValueError),
        match=r"(?s)PerReplica.*`strategy.reduce`.*experimental_local_results",
    ) as info:
        OPERATIONS[name](result)
    assert "Joined" not in str(info.value)
