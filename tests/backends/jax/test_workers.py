"""Workers on JAX share sums and batches, and keep devices and state."""

import functools
import importlib
import re
from types import SimpleNamespace

import jax
import keras
import numpy as np
import pytest
import worker_jobs

import keras_dist
from keras_dist.core.device import Device
from keras_dist.core.options import CommunicationOptions
from keras_dist.core.plan import Cluster
from keras_dist.core.plan import Plan
from keras_dist.errors import ClusterError
from keras_dist.plugin.recorder import FlightRecorder
from keras_dist_jax import backend
from keras_dist_jax import runtime_internals
from keras_dist_jax.cluster import start as joining
from keras_dist_jax.cluster import workers
from keras_dist_jax.cluster.watched import WatchedThrottle
from keras_dist_jax.throttle import OneAtATime


@functools.cache
def found():
    """What each of two workers with two devices found."""
    return keras_dist.launch(
        worker_jobs.everything, workers=2, devices=2, timeout=400
    )


def test_each_worker_keeps_its_own_and_a_step_sums_once():
    for each in found():
        assert each["devices"] == ["cpu:0", "cpu:1"]
        assert each["all_reduces"] == [1]
        assert (each["after_fit"], each["after_one_row"]) == (0, 0)
        # A step that is not compiled gives the same.
        np.testing.assert_allclose(each["eager"], each["compiled"], rtol=1e-5)
        assert {*each["listening"]} == {"127.0.0.1"}


def test_broadcast_keeps_every_bit():
    expected = [
        np.array([-0.0, np.nan, np.inf, 1e-45], "float32"),
        np.array([True, False, True]),
        np.array(7, "int32"),
        np.zeros((0, 3), "float32"),
        np.array([1.5, -2.0, 3.0], jax.numpy.bfloat16),
    ]
    for each in found():
        for value, wanted in zip(
            each["collectives"]["broadcast"], expected, strict=True
        ):
            assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape)
            assert value.tobytes() == wanted.tobytes()


def test_sums_of_several_dtypes():
    for each in found():
        floats, integers, rest = each["collectives"]["sum"]
        np.testing.assert_array_equal(floats, np.full((2, 2), 4.0, "float32"))
        assert integers == np.int32(2**31 + 1 - 2**32)  # exact, modulo 2**32
        np.testing.assert_array_equal(rest, [1.0])


def test_gathered_values_are_in_worker_order():
    for each in found():
        (first,), (second,) = each["collectives"]["gather"]
        np.testing.assert_array_equal([first, second], [[0, 1, 2], [1, 2, 3]])
        assert first.dtype == np.int8
        assert each["collectives"]["sizes"] == [[0, 5], [1, 5]]
        many = each["collectives"]["many sizes"]
        assert many == [[0] * 600, [1] * 600]
        # In buffers of their own sizes, workers would wait for ever.
        others = each["collectives"]["other sizes"]
        assert "70 sizes of arguments" in others
        assert "570 sizes of arguments" in others


def test_a_worker_may_have_nothing_to_concatenate():
    for each in found():
        rows, columns = (each["collectives"][k] for k in ("rows", "columns"))
        assert each["collectives"]["programs"] == 0  # few serve all sizes
        np.testing.assert_array_equal(rows, [[1.0, 1.0]])
        np.testing.assert_array_equal(columns, [[1.0], [1.0]])


def test_a_compiled_function_gathers_and_reduces_inside():
    for each in found():
        rows, total, _ = each["statistics"]
        np.testing.assert_array_equal(rows, worker_jobs.X[:13])
        np.testing.assert_allclose(total, rows.sum(axis=0), rtol=1e-5)
    first, second = (each["statistics"][2] for each in found())
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.abs(first[2]).min() > 0  # they have moved


def test_private_names_are_where_they_were():
    names = re.findall(r"`(jax(?:lib)?\._[\w.]+)`", runtime_internals.__doc__)
    assert len(names) > 8
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


CLUSTER = Cluster(0, "127.0.0.1:1", ("127.0.0.1:1", "127.0.0.1:2"))


def test_no_cluster_is_joined_once_jax_has_started():
    keras.ops.zeros(())
    with pytest.raises(RuntimeError, match="must be created at program start"):
        joining.join(CLUSTER, CommunicationOptions())


@pytest.fixture
def connected(monkeypatch):
    """A process that `jax.distributed.initialize` has connected with others."""
    state = importlib.import_module("jax._src.distributed").global_state
    monkeypatch.setattr(state, "client", object())
    monkeypatch.setattr(state, "num_processes", 3)


def test_no_cluster_is_joined_by_a_process_that_jax_has_connected(connected):
    with pytest.raises(RuntimeError, match="distributed.initialize` has been"):
        joining.join(CLUSTER, CommunicationOptions())


def test_a_process_that_jax_has_connected_does_not_train_alone(connected):
    with pytest.raises(ClusterError, match="connects with 2 others"):
        keras_dist.MultiWorkerMirroredStrategy()


def test_workers_in_another_order_than_the_hosts(monkeypatch):
    others = [SimpleNamespace(id=9), *jax.local_devices()[1:]]
    monkeypatch.setattr(backend, "devices_of", lambda *_: [others, others])
    cpu = Device("cpu", 0)
    with pytest.raises(
        ClusterError, match="(?s)worker 0.*process 0.*TPU_WORKER"
    ):
        backend.mesh_of(Plan(((cpu,),), (cpu,), CLUSTER), SimpleNamespace())


def test_workers_with_unequal_devices(monkeypatch):
    """Also where each could divide its own into replicas of two."""
    devices = jax.local_devices()
    monkeypatch.setattr(
        workers, "devices_by_worker", lambda *_: [devices, devices[:2]]
    )
    cpus = tuple(Device("cpu", index) for index in range(4))
    plan = Plan((cpus[:2], cpus[2:]), cpus, CLUSTER)
    with pytest.raises(ClusterError, match=r"\[4, 2\] devices on workers"):
        backend.mesh_of(plan, SimpleNamespace())


def test_gradients_have_no_dtype_of_their_own():
    options = CommunicationOptions(dtype="bfloat16")
    with pytest.raises(ClusterError, match="the compiler chooses"):
        joining.join(CLUSTER, options)


def test_a_gate_that_was_not_entered_is_left():
    class Watched:
        """Notes what a throttle tells, and fails once."""

        told, fails = (), True

        def enter(self):
            if self.fails:
                raise KeyboardInterrupt
            self.told += ("enter",)

        def exit(self, pending=None):
            self.told += ("exit",)

    watch = Watched()
    recorder = FlightRecorder()
    throttle = WatchedThrottle(
        OneAtATime(), watch, recorder, lambda error: error
    )
    with pytest.raises(KeyboardInterrupt), throttle.lock:
        pass
    watch.fails, watch.told = False, ()
    with throttle.lock, throttle.lock:
        pass
    assert watch.told == ("enter", "enter", "exit")
