"""The public names are frozen, and importing them stays cheap."""

import subprocess
import sys

import keras_dist

NAMES = [
    "AutoShardPolicy",
    "BackendNotFoundError",
    "CentralStorageStrategy",
    "ClusterError",
    "CrossDeviceOps",
    "DeviceError",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "KerasDistError",
    "MetricMergeError",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "OutOfRangeError",
    "PerReplica",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "ReplicaDivergenceError",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "StrategyMismatchError",
    "TraceError",
    "UnsupportedKerasError",
    "UnsupportedModelError",
    "VirtualDevicesError",
    "WorkerLostError",
    "cluster_resolver",
    "compat",
    "compute_average_loss",
    "experimental",
    "experimental_set_strategy",
    "function",
    "get_replica_context",
    "get_strategy",
    "gradient",
    "has_strategy",
    "in_cross_replica_context",
    "launch",
    "list_devices",
    "print",
    "scale_regularization_loss",
    "scan_steps",
    "set_virtual_devices",
    "summary",
    "testing",
    "value_and_grad",
]


def test_names_are_those():
    assert sorted(keras_dist.__all__) == keras_dist.__all__ == NAMES
    assert all(hasattr(keras_dist, name) for name in NAMES)


def test_every_public_name_has_a_docstring_with_an_example():
    for name in NAMES:
        thing = getattr(keras_dist, name)
        assert thing.__doc__, name
        if callable(thing) and not name.endswith("Error"):
            assert "Example:" in thing.__doc__, name


def test_errors_keep_the_builtin_that_tf_distribute_raises():
    for error, builtin in [
        (keras_dist.DeviceError, ValueError),
        (keras_dist.BackendNotFoundError, ImportError),
        (keras_dist.StrategyMismatchError, RuntimeError),
        (keras_dist.VirtualDevicesError, RuntimeError),
    ]:
        assert issubclass(error, builtin)
        assert issubclass(error, keras_dist.KerasDistError)


def _modules_after(statement, environment):
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return set(done.stdout.split())


def test_import_loads_no_framework_that_keras_does_not(monkeypatch):
    import os

    monkeypatch.delenv("KERAS_DIST_VIRTUAL_DEVICES", raising=False)
    environment = dict(os.environ)
    plain = _modules_after("import keras", environment)
    ours = _modules_after("import keras_dist", environment)
    frameworks = {"jax", "tensorflow", "torch"}
    assert ours & frameworks == plain & frameworks
    # What it loads beside its own modules, Keras has loaded already.
    others = {x for x in ours - plain if not x.startswith("keras_dist")}
    assert len(others) <= 0.01 * len(plain), sorted(others)
