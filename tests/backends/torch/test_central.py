"""Central storage sends weights once a step each way, and keeps one copy.

PyTorch has one CPU. Here devices of different names count as apart, so that
what is sent is really copied.
"""

import threading

import keras
import numpy as np
import pytest
import torch
from keras import ops
from torch.utils._python_dispatch import TorchDispatchMode

import keras_dist
from backends.classifier import classifier
from backends.classifier import rows
from keras_dist_torch import replicas
from keras_dist_torch import transfers
from parity import cases
from parity.harness import assert_same
from parity.harness import central
from parity.harness import plain
from parity.harness import strategy
from parity.harness import train
from steps import train_step

X, Y = rows(40)
CASES = [c for c in cases.CASES if c.full and "torch" in c.backends]


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    monkeypatch.setattr(
        transfers, "are_apart", lambda here, there: here != there
    )


def storage_of(tensor):
    return tensor.untyped_storage().data_ptr()


class Traffic(TorchDispatchMode):
    """Counts copies between pieces of memory, in every replica's thread."""

    def __init__(self, variables):
        super().__init__()
        self._homes = {storage_of(v.value) for v in variables}
        self._threads = set()
        self.pieces = []
        self.single = []
        self.computed_at_home = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            to, source = args[:2]
            if storage_of(to) != storage_of(source):
                if source.dtype == torch.uint8:
                    self.pieces.append(source.nbytes)
                elif storage_of(source) in self._homes:
                    self.single.append(source.nbytes)
        elif func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.computed_at_home += [
                func for arg in args if storage_of(arg) in self._homes
            ]
        return func(*args, **(kwargs or {}))

    def enter_thread(self):
        if threading.get_ident() not in self._threads:
            self._threads.add(threading.get_ident())
            self.__enter__()


@pytest.fixture
def traffic_of(monkeypatch):
    """A callable: the `Traffic` of one call, over several threads."""
    current = []
    capture = replicas.capture_thread

    def capturing():
        inherit = capture()

        def enter():
            inherit()
            for traffic in current:
                traffic.enter_thread()

        return enter

    monkeypatch.setattr(replicas, "capture_thread", capturing)

    def count(fn, variables):
        current[:] = [Traffic(variables)]
        with current[0] as traffic:
            fn()
        current.clear()
        return traffic

    return count


@pytest.fixture
def traffic_of_step(traffic_of):
    """A callable: the `Traffic` of a model's third step, or a later one."""

    def count(model):
        def step():
            model.train_on_batch(X[:12], Y[:12])

        step()
        step()
        return traffic_of(step, model.variables)

    return count


def num_bytes(tensors):
    return sum(t.value.nbytes for t in tensors)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("num_layers", [1, 6])
def test_one_copy_each_way(traffic_of_step, num_replicas, num_layers):
    with central(num_replicas).scope():
        model = classifier(
            *(keras.layers.Dense(8) for _ in range(num_layers)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
        )
    traffic = traffic_of_step(model)
    assert_moved(traffic, model, num_replicas)
    assert not traffic.computed_at_home


def assert_moved(traffic, model, num_replicas):
    """One piece to each replica, one back; and metrics that have changed."""
    state = model.variables + model.metrics_variables
    padding = 64 * len(state)
    trained = num_bytes(model.trainable_variables)
    small = [size for size in traffic.pieces if size <= 64 * 4]
    large = sorted(size for size in traffic.pieces if size > 64 * 4)
    returned, sent = large[:num_replicas], large[num_replicas:]
    assert len(sent) == len(returned) == num_replicas
    assert len(small) <= num_replicas
    assert all(0 <= each - num_bytes(state) <= padding for each in sent)
    assert all(0 <= each - trained <= padding for each in returned)
    assert traffic.single == []


def test_weights_are_sent_once_a_step_of_fit(monkeypatch):
    """The loss is read after the update: only its state is sent again."""
    with central(1).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(99)])
        model.compile("adam", "mse")
    y = np.zeros((40, 99), "float32")

    def fit(steps):
        model.fit(X[: 4 * steps], y[: 4 * steps], batch_size=4, verbose=0)

    fit(2)
    # Counted here, because `Traffic` hides in-place changes of lists.
    pieces = []
    send = transfers.Arrangement.send

    def counted(self, flat, device):
        pieces.append(flat.nbytes)
        return send(self, flat, device)

    monkeypatch.setattr(transfers.Arrangement, "send", counted)
    fit(3)
    trained = num_bytes(model.trainable_variables)
    large = [each for each in pieces if each >= trained]
    assert len(large) == 2 * 3
    assert sum(pieces) < 1.2 * sum(large)


def test_many_gradients_come_back_in_pieces(traffic_of_step, monkeypatch):
    def trained():
        keras.utils.set_random_seed(0)
        with central(2).scope():
            model = classifier(*(keras.layers.Dense(16) for _ in range(4)))
        return model, traffic_of_step(model)

    expected, at_once = trained()
    # A kernel of 16 x 16 fills one, the rest share.
    monkeypatch.setattr(transfers, "PIECE", 4 * 16 * 16)
    model, traffic = trained()
    for own, other in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(own.numpy(), other.numpy())
    largest = max(w.value.nbytes for w in model.trainable_variables)
    *_, sent = sorted(at_once.pieces)
    back = [each for each in traffic.pieces if each != sent]
    assert max(back) <= largest + 64 * 4
    assert len(back) > len(at_once.pieces)
    assert traffic.single == []


def test_replicas_beside_the_variables_are_sent_nothing(traffic_of_step):
    made = keras_dist.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0")
    with made.scope():
        model = classifier(keras.layers.Dense(8))
    traffic = traffic_of_step(model)
    assert_moved(traffic, model, 1)


def test_devices_that_share_memory_move_nothing(traffic_of_step, monkeypatch):
    monkeypatch.undo()
    with central(2).scope():
        model = classifier(keras.layers.Dense(8))
    traffic = traffic_of_step(model)
    assert (traffic.pieces, traffic.single) == ([], [])


def test_a_loop_of_ones_own_moves_as_little(traffic_of):
    made = central(2)
    with made.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        optimizer = keras.optimizers.Adam()
        steps = keras.Variable(0.0, aggregation="mean", trainable=False)
    optimizer.build(model.trainable_variables)

    update = train_step(model, optimizer, lambda x: ops.mean(model(x) ** 2, 1))

    def step(x):
        update(x)
        steps.assign_add(1.0)

    (batch,) = made.experimental_distribute_dataset([X[:8]])
    for _ in range(2):
        made.run(step, args=(batch,))
    traffic = traffic_of(
        lambda: made.run(step, args=(batch,)),
        [*model.variables, steps],
    )
    assert float(steps) == 3.0
    # Weights, gradients, and what was counted.
    assert len([each for each in traffic.pieces if each > 64]) == 4
    assert len(traffic.pieces) <= 6
    assert traffic.single == []


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_memory(live_bytes, num_replicas):
    before = live_bytes()
    within = []

    class Spy(keras.layers.Layer):
        def call(self, inputs):
            if inputs.device.type != "meta":
                within.append(live_bytes() - before)
            return inputs

    with keras_dist.CentralStorageStrategy(
        [f"cpu:{i}" for i in range(num_replicas)], "cpu:3"
    ).scope():
        model = classifier(
            keras.layers.Dense(256), keras.layers.Dense(256), Spy()
        )
    after = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            after.append(live_bytes() - before)

    model.fit(X, Y, batch_size=8, callbacks=[Watch()], verbose=0)
    weights = num_bytes(model.variables)
    slots = num_bytes(model.optimizer.variables)
    small = 64 * len(model.variables) + 8 * X.nbytes
    away = num_replicas - (num_replicas == 4)
    # Nothing of parameters or gradients on a device that computes.
    assert weights + slots <= max(after) <= weights + slots + small
    # In the forward pass of the last one, a copy for each that is not beside
    # the variables, and the gradients of the others.
    copies = weights * (1 + away) + weights * (num_replicas - 1)
    assert max(within) <= copies + slots + 4 * small


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize(
    ("make", "num_replicas"), [(central, 1), (central, 2), (strategy, 2)]
)
def test_same_numbers(case, make, num_replicas):
    assert_same(train(case, num_replicas, make), plain(case), case.rtol)


def sgd_weights(change, steps=3):
    """Weights after some steps, with a change of them between."""
    model = classifier(keras.layers.Dense(4), optimizer="sgd")
    model.set_weights([np.full(w.shape, 0.1, "float32") for w in model.weights])
    for _ in range(steps):
        model.train_on_batch(X[:7], Y[:7])
        model = change(model) or model
    return model.get_weights()


def _new_memory(model):
    kernel = model.layers[0].kernel.value
    kernel.data = torch.full_like(kernel.data, 0.3)


def _assign(model):
    model.layers[0].kernel.assign(np.full((6, 4), 0.3, "float32"))


def _through_torch(model):
    with torch.no_grad():
        model.layers[0].kernel.value.mul_(0.5)


def _other_first(model):
    model.predict(X[:5], verbose=0)
    model.evaluate(X[:5], Y[:5], verbose=0)


@pytest.mark.parametrize(
    "change", [_new_memory, _assign, _through_torch, _other_first]
)
def test_changes_between_steps_are_noticed(change):
    expected = sgd_weights(change)
    with central(2).scope():
        actual = sgd_weights(change)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_variable_with_new_memory_goes_with_the_others_again(traffic_of_step):
    with central(2).scope():
        model = classifier(keras.layers.Dense(4))
    for change in (_assign, _new_memory):
        model.train_on_batch(X[:12], Y[:12])
        before = model.layers[0].kernel.value
        change(model)
        assert model.layers[0].kernel.value is before
    traffic = traffic_of_step(model)
    assert_moved(traffic, model, 2)


def test_variables_in_several_memories_are_refused(monkeypatch):
    monkeypatch.setattr(
        replicas,
        "torch_device",
        lambda device: torch.device("meta", device.index),
    )
    with pytest.raises(keras_dist.DeviceError, match="parameter_device=cpu:1"):
        keras_dist.CentralStorageStrategy(["cpu:0"], ["cpu:1", "cpu:2"])


def test_initial_values_are_drawn_where_replicas_compute(monkeypatch):
    """GPUs and CPUs draw other numbers from the same seed."""
    from keras_dist_torch.keras_internals import device_scope

    drawn = []

    class Own(keras.initializers.Initializer):
        def __call__(self, shape, dtype=None):
            drawn.append(device_scope())
            return keras.random.normal(shape, dtype=dtype, seed=1)

    plan_of = keras_dist.CentralStorageStrategy(["cpu:0"], "cpu:1")
    executor = plan_of.executor
    # A device that this machine has, by a name that tells it from the CPU.
    monkeypatch.setattr(executor, "_devices", [torch.device("cpu", 0)])
    with plan_of.scope():
        layer = keras.layers.Dense(3, kernel_initializer=Own())
        layer.build((None, 2))
        alone = keras.Variable(Own(), shape=(2,))
        assert device_scope() == "cpu"
    assert drawn == ["cpu:0"] * 2
    assert layer.kernel.value.device == alone.value.device
    with plan_of.scope():
        keras.Variable(Own(), shape=(2,))
    keras.Variable(Own(), shape=(2,))
    assert drawn[2:] == ["cpu:0", None]
