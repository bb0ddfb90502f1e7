"""Strategies and their values that are used wrongly: what to write instead."""

import pickle

import keras
import numpy as np
import pytest

import keras_dist

KINDS = {
    "mirrored": lambda: keras_dist.MirroredStrategy(["cpu:0", "cpu:1"]),
    "one": lambda: keras_dist.OneDeviceStrategy("cpu:0"),
    "central": lambda: keras_dist.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "default": keras_dist.get_strategy,
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_a_strategy_is_not_pickled(kind):
    strategy = KINDS[kind]()
    with pytest.raises(TypeError, match="can't be pickled.*load_model") as info:
        pickle.dumps(strategy)
    assert repr(strategy) in str(info.value)


@each_kind
def test_with_a_strategy_says_scope(kind):
    strategy = KINDS[kind]()
    with pytest.raises(TypeError, match=r"with strategy\.scope\(\):"), strategy:
        pass


@each_kind
def test_with_a_scope_that_is_not_called(kind):
    scope = KINDS[kind]().scope
    with pytest.raises(TypeError, match=r"with strategy\.scope\(\):"), scope:
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


def test_a_missing_argument_names_what_there_is():
    with pytest.raises(TypeError, match=r"'device'.*OneDeviceStrategy\(device"):
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
