"""Workers on PyTorch send few sums, early, and what all agree on."""

import contextlib
import os
import subprocess
import sys
from unittest import mock

import keras
import numpy as np
import pytest
import torch

import keras_dist
from keras_dist.core.plan import Cluster
from keras_dist.plugin.membership import alone_on_purpose
from keras_dist_torch import workers
from workers import count_jobs

STEPS = 4


@pytest.fixture(scope="module")
def counted():
    return keras_dist.launch(
        count_jobs.everything, (STEPS,), workers=2, devices=1, timeout=400
    )


@pytest.mark.parametrize(
    ("kind", "gathers"),
    [
        *(("loss", 0), ("none", 0), ("adding", 0)),
        # Rows do not fit, and no metric is sent in 16 bits.
        *(("others", STEPS), ("bfloat16", STEPS)),
    ],
)
def test_metrics_travel_with_the_only_bucket_if_they_fit(
    counted, kind, gathers
):
    for worker in counted:
        assert worker[kind]["sums"] == STEPS
        assert worker[kind]["gathers"] == gathers


@pytest.mark.parametrize(
    ("variables", "most"), [("mirrored", 1.15), ("sharded", 2.0)]
)
def test_python_calls_of_a_step_in_those_of_plain_keras(
    counted, variables, most
):
    for worker in counted:
        calls = worker["calls"]
        assert calls[variables] <= most * calls["plain"]


def test_buckets_leave_during_the_backward_pass(counted):
    for worker in counted:
        found = worker["buckets"]
        assert found["sums"] == 3 * STEPS
        # The first step learns which gradients come with which, and the last
        # bucket leaves with the update.
        assert found["early"] == 2 * (STEPS - 1)
        assert found["gathers"] == 0


@pytest.mark.parametrize("kind", ["told", "told_before"])
def test_logs_are_those_of_one_device(counted, kind):
    """An update that waits for metrics has happened where it shows."""
    for worker in counted:
        found = worker[kind]
        for own, expected in zip(found["logs"], found["expected"], strict=True):
            assert own == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert repr(counted[0][kind]["logs"]) == repr(counted[1][kind]["logs"])


def test_two_backward_passes_for_one_update(counted):
    """What left early was half of it: it is sent again, and no more early."""
    for worker in counted:
        found = worker["twice"]
        assert found["weights"] == pytest.approx(found["expected"], rel=1e-5)
        assert found["early"] == 1
    assert counted[0]["twice"]["weights"] == counted[1]["twice"]["weights"]


def test_a_failed_step_leaves_no_bucket(counted):
    for worker in counted:
        found = worker["broken"]
        assert found["early"] == 1
        assert found["left"]
        assert not any(found["left"])
    assert counted[0]["broken"]["weights"] == counted[1]["broken"]["weights"]


def test_masks_differ_and_shuffling_does_not(counted):
    assert all(worker["drawn"]["differ"] for worker in counted)
    assert counted[0]["drawn"]["next"] == counted[1]["drawn"]["next"]


def test_a_layer_that_only_one_worker_used(counted):
    first, second = (worker["experts"] for worker in counted)
    assert first == second
    biases = [first[1], first[3]]
    assert all(any(bias) for bias in biases)
    assert biases[0] != biases[1]


def test_rows_that_the_data_chooses(counted):
    for worker in counted:
        assert worker["positive"] == pytest.approx(2.0)


def test_torchs_default_group_is_left_alone(counted):
    assert not any(worker["has_default_group"] for worker in counted)


def test_the_store_listens_where_it_was_told_to(counted):
    for worker in counted:
        assert worker["listening"] <= {"127.0.0.1"}
    assert counted[0]["listening"] == {"127.0.0.1"}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["of_a_strategy", "alone_on_purpose"])
def test_models_stay_out_of_a_default_group(kind):
    """Keras 3.16 would put them into DistributedDataParallel."""
    x = np.ones((4, 2), "float32")
    strategy = keras_dist.MirroredStrategy(["cpu:0", "cpu:1"])
    made_in, trained_in = {
        "of_a_strategy": (strategy.scope, contextlib.nullcontext),
        "alone_on_purpose": (contextlib.nullcontext, alone_on_purpose),
    }[kind]
    histories = []
    for has_group in (False, True):
        if has_group:
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group(
                "gloo", store=store, rank=0, world_size=1
            )
        try:
            keras.utils.set_random_seed(0)
            with made_in():
                model = keras.Sequential(
                    [keras.Input((2,)), keras.layers.Dense(1)]
                )
            model.compile("sgd", "mse")
            with trained_in():
                histories.append(model.fit(x, x[:, :1], epochs=2, verbose=0))
            assert getattr(model, "ddp_model", None) is None
        finally:
            if has_group:
                torch.distributed.destroy_process_group()
    plain, with_group = (each.history["loss"] for each in histories)
    assert with_group == pytest.approx(plain, rel=1e-6)


def test_nccl_without_gpus_is_refused():
    code = (
        "import keras_dist as d; E = d.experimental\n"
        "o = E.CommunicationOptions(implementation='NCCL')\n"
        "try: d.MultiWorkerMirroredStrategy(communication_options=o)\n"
        "except d.ClusterError as error: print(error)"
    )
    # Nobody gets as far as using them.
    addresses = "127.0.0.1:1,127.0.0.1:2"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "KERAS_DIST_WORKERS": addresses,
            "KERAS_DIST_WORKER_INDEX": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "NCCL needs GPUs" in done.stdout


@pytest.mark.parametrize("means", ["gpu of the chief", "shared gpu"])
def test_gloo_where_nccl_would_refuse(means):
    """It needs a GPU on every worker, and each its own."""
    found = keras_dist.launch(
        count_jobs.group_with, (means,), workers=2, devices=1, timeout=200
    )
    assert found == [("ProcessGroupGloo", 2.0)] * 2


def test_nccl_for_workers_that_share_a_gpu_is_refused():
    asked = keras_dist.CommunicationOptions(implementation="NCCL")
    shared = [["nccl", "GPU-1", "GPU-2"], ["nccl", "GPU-2"]]
    with pytest.raises(keras_dist.ClusterError, match="(?s)share a GPU.*GPU-2"):
        workers.may_use_nccl(shared, asked)
    apart = [["nccl", "GPU-1"], ["nccl", "GPU-2"]]
    assert workers.may_use_nccl(apart, asked)
    assert not workers.may_use_nccl([["nccl", "GPU-1"], ["gloo"]], asked)


def test_sums_that_nccl_did_not_finish_are_an_error(monkeypatch):
    """NCCL's waits end without an error when a lost worker ends the group."""
    alone = object.__new__(workers.TorchWorkers)
    alone.cluster = Cluster(1, "host:1", ("host:1", "host:2"))
    alone.group, alone._frames, alone._beats = (mock.Mock() for _ in range(3))
    alone._beats.describe_lost.return_value = "worker 0 is gone"
    alone._beats.apart = None
    alone._is_nccl, alone._is_aborted = True, False
    stream = mock.Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    wait = alone.start_sum(torch.ones(2))
    wait()
    stream.synchronize.side_effect = alone._abort
    wait = alone.start_sum(torch.ones(2))
    with pytest.raises(keras_dist.WorkerLostError, match="worker 0 is gone"):
        wait()
    alone.group.abort.assert_called_once_with()


def test_a_process_of_a_group_does_not_train_alone():
    fake_pg = pytest.importorskip(
        "torch.testing._internal.distributed.fake_pg",
        reason="This version of PyTorch has no groups without processes.",
    )
    torch.distributed.init_process_group(
        "fake", store=fake_pg.FakeStore(), rank=0, world_size=3
    )
    try:
        with pytest.raises(keras_dist.ClusterError, match="with 2 others"):
            keras_dist.MultiWorkerMirroredStrategy()
    finally:
        torch.distributed.destroy_process_group()


def test_gloo_on_gpus_is_refused_for_variables_in_parts():
    alone = object.__new__(workers.TorchWorkers)
    alone._is_nccl = False
    with pytest.raises(keras_dist.ClusterError, match="a GPU for each worker"):
        alone.check_fsdp("cuda")
    alone.check_fsdp("cpu")
    alone._is_nccl = True
    alone.check_fsdp("cuda")
