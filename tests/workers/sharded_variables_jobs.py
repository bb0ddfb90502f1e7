"""What workers run in `test_sharded_variables.py`."""

import keras
import numpy as np

import keras_dist
from parity import cases
from parity import harness
from workers import sharded_jobs
from workers import sharded_models
from workers.jobs import attempted

VARIABLES = {"variables": "sharded"}


def in_cluster(least_elements=1):
    """The strategy under which this worker trains from now on."""
    from keras_dist_torch import parts

    parts.LEAST_ELEMENTS = least_elements
    strategy = keras_dist.MultiWorkerMirroredStrategy(**VARIABLES)
    harness.strategy = lambda num_replicas: strategy
    return strategy


def train_case(name):
    """The outcome of a case of the parity table."""
    count = in_cluster().num_replicas_in_sync
    (case,) = (case for case in cases.CASES if case.name == name)
    return harness.train(case, count, harness.strategy)


def save_all(folder):
    """Trains and saves in each way there is."""
    in_cluster()
    return sharded_jobs.save_all(folder, VARIABLES)


def load_all(folder):
    """Loads what `save_all` has saved, and goes on."""
    in_cluster()
    return sharded_jobs.load_all(folder, VARIABLES)


def train_cases(names):
    return [attempted(train_case, name) for name in names]


def run_program(name, optimizer):
    """What a program computes on this worker."""
    strategy = in_cluster(least_elements=64)
    return sharded_models.PROGRAMS[name](strategy.scope(), optimizer)


def live_bytes():
    """Bytes of all tensors that are alive here."""
    import gc

    import torch

    gc.collect()
    sizes = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and not each.is_meta:
            local = getattr(each, "_local_tensor", each)
            storage = local.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def bytes_kept(_):
    """For each variable in parts, bytes here and in all; and what is alive."""
    strategy = in_cluster(least_elements=64)
    before = live_bytes()
    model = sharded_models.compiled(sharded_models.wide, strategy.scope())
    model.fit(
        sharded_models.NUMBERS, sharded_models.CLASSES, batch_size=5, verbose=0
    )
    home = strategy.executor.home
    kept = {
        variable.path: (
            sum(home(variable).bytes_kept().values()),
            4 * int(np.prod(variable.shape)),
        )
        for variable in [*model.variables, *model.optimizer.variables]
    }
    return kept, live_bytes() - before


def collectives(_):
    """The collectives of a step, by name."""
    from torch.distributed.tensor.debug import CommDebugMode

    strategy = in_cluster(least_elements=64)
    model = sharded_models.compiled(sharded_models.wide, strategy.scope())
    x, y = sharded_models.NUMBERS, sharded_models.CLASSES
    model.train_on_batch(x, y)
    with CommDebugMode() as counting:
        model.train_on_batch(x, y)
    return {
        str(k).split(".")[-1]: v for k, v in counting.get_comm_counts().items()
    }


def mirrored_program(name, optimizer):
    strategy = keras_dist.MultiWorkerMirroredStrategy()
    return sharded_models.PROGRAMS[name](strategy.scope(), optimizer)


def refused(_):
    """What is refused on variables in parts, as texts."""
    import torch

    strategy = in_cluster(least_elements=64)
    x, y = sharded_models.NUMBERS, sharded_models.CLASSES
    model = sharded_models.compiled(sharded_models.dense, strategy.scope())
    model.fit(x, y, verbose=0)
    kernel = model.layers[0].kernel
    before = kernel.numpy()

    class Derives(sharded_models.Parts):
        def train_step(self, data):
            loss = keras.ops.mean(self.encoder(data[0]))
            torch.autograd.grad(loss, [self.encoder.kernel.value])

    with strategy.scope():
        derives = Derives()
        derives.build(None)
        derives.compile("sgd")
    plain = keras.Sequential(model.layers)
    plain.compile("sgd", "mse")
    found = {
        "run": attempted(strategy.run, lambda: None),
        "apply": attempted(
            model.optimizer.apply,
            [keras.ops.ones(v.shape) for v in model.trainable_variables],
            model.trainable_variables,
        ),
        "derivatives": attempted(derives.train_on_batch, x),
        "plain": attempted(plain.fit, x, x[:, :4]),
    }
    assert np.array_equal(before, kernel.numpy())
    return found


def settings(_):
    """Other things."""
    strategy = in_cluster(least_elements=64)
    x, y = sharded_models.NUMBERS, sharded_models.CLASSES
    with strategy.scope():
        model = sharded_models.dense()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(True), jit_compile=True)
    found = {}
    found["jit"] = attempted(model.train_on_batch, x, y)
    found["summary"] = attempted(lambda: str(keras_dist.summary(model)))
    found["strategy summary"] = attempted(lambda: str(strategy.summary(model)))
    found["verify"] = attempted(lambda: str(strategy.verify(model, x, y)))
    found["repr"] = repr(model.layers[0].kernel), repr(model.layers[0]), repr(strategy)
    found["clone"] = attempted(lambda: type(keras.models.clone_model(model)).__name__)
    found["config"] = str(model.get_config())[:900]
    found["isinit"] = __import__("torch").distributed.is_initialized()
    found["plan"] = attempted(lambda: str(strategy.plan))
    return found
