"""What workers run in `test_sharded.py`."""

import contextlib
import importlib
import pathlib
from unittest import mock

import keras
import numpy as np

import keras_dist
from keras_dist.errors import ClusterError
from parity import cases
from parity import harness
from parity.harness import to_numpy
from sharded.helpers import X
from sharded.helpers import Y
from sharded.helpers import adam
from sharded.helpers import fit
from sharded.helpers import network
from sharded.helpers import state_of
from workers.jobs import attempted


def in_cluster(what="optimizer_state"):
    """The strategy that parity cases are trained under from now on."""
    # Small models will do. The cluster stays for other tests.
    if keras.backend.backend() == "jax":
        from keras_dist_jax.sharding import shards

        is_of_all = what == "optimizer_state"
        shards.LEAST_ELEMENTS = LEAST_ELEMENTS if is_of_all else 1
    else:
        from keras_dist_torch import parts

        parts.LEAST_ELEMENTS = 1
    strategy = keras_dist.MultiWorkerMirroredStrategy(**{what: "sharded"})
    harness.strategy = harness.sharded = lambda num_replicas: strategy
    return strategy


def passes(module, name, *args):
    """Runs a test of one process, on this cluster in place of its devices."""
    in_cluster()
    mirrored = keras_dist.MultiWorkerMirroredStrategy()
    with mock.patch.multiple(
        harness, strategy=lambda num_replicas: mirrored, scope=_scope
    ):
        getattr(importlib.import_module(module), name)(*args)


def _scope(num_replicas, make=None):
    """In place of plain Keras, of which each worker would train a model."""
    if num_replicas is None:
        return keras_dist.OneDeviceStrategy("cpu:0").scope()
    return make(num_replicas).scope()


def trains_what_is_not_contiguous():
    outcomes = []
    for count in (None, 2):
        with harness.scope(count, harness.sharded):
            model = network()
            for variable in model.trainable_variables:
                data = variable.value.data
                if data.ndim == 2:
                    variable.value.data = data.t().contiguous().t()
            model.compile("adam", "mse")
        model.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
        outcomes.append(model.get_weights())
    for plain, own in zip(*outcomes, strict=True):
        np.testing.assert_allclose(own, plain, rtol=2e-5, atol=1e-6)


def train_case(what, name):
    """The outcome of a case of the parity table."""
    count = in_cluster(what).num_replicas_in_sync
    (case,) = (case for case in cases.CASES if case.name == name)
    return harness.train(case, count, harness.strategy)


LEAST_ELEMENTS = 1024  # of a variable that is sharded


def compiled(strategy):
    with strategy.scope():
        model = network()
        model.compile(adam(), "mse")
    return model


class Interrupt(keras.callbacks.Callback):
    """Ends training in the third epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


def save_all(what, folder):
    """Trains and saves in each way there is; what the state was then."""
    strategy = in_cluster(what)
    # Files that only the chief has: a folder of each worker's own.
    own = pathlib.Path(folder, str(strategy.plan.cluster.index))
    own.mkdir(parents=True, exist_ok=True)
    model = compiled(strategy)
    checkpoint = keras.callbacks.ModelCheckpoint(
        str(own / "each" / "{epoch}.keras"), save_best_only=True
    )
    fit(model, callbacks=[checkpoint], validation_split=0.2)
    model.save(str(own / "model.keras"))
    model.save_weights(str(own / "some.weights.h5"))
    saved = state_of(model)
    backed = compiled(strategy)
    backup = keras.callbacks.BackupAndRestore(str(own / "backup"))
    with contextlib.suppress(KeyboardInterrupt):
        fit(backed, epochs=4, callbacks=[backup, Interrupt()])
    return {
        "saved": saved,
        "files": sorted(
            str(p.relative_to(own)) for p in own.rglob("*") if p.is_file()
        ),
    }


def load_all(what, folder):
    """Loads what `save_all` has saved, and goes on."""
    strategy = in_cluster(what)
    chiefs = pathlib.Path(folder, "0")
    own = pathlib.Path(folder, str(strategy.plan.cluster.index))
    with strategy.scope():
        model = keras.models.load_model(str(chiefs / "model.keras"))
    loaded = state_of(model)
    fit(model)
    weights = compiled(strategy)
    weights.optimizer.build(weights.trainable_variables)
    weights.load_weights(str(chiefs / "some.weights.h5"))
    backed = compiled(strategy)
    backup = keras.callbacks.BackupAndRestore(str(own / "backup"))
    fit(backed, epochs=4, callbacks=[backup])
    return {
        "loaded": loaded,
        "gone_on": state_of(model),
        "weights": state_of(weights),
        "backed": state_of(backed),
    }


def bytes_kept(what):
    """Each sharded variable's bytes on this worker's devices, and its value."""
    strategy = in_cluster(what)
    model = compiled(strategy)
    fit(model, epochs=1)
    executor = strategy.executor
    sharded = [v for v in model.optimizer.variables if len(v.shape)]
    if what == "variables":
        sharded += model.trainable_variables
    return [
        (list(executor.storage(v).bytes_kept().values()), tuple(v.shape))
        for v in sharded
    ], [to_numpy(v).tolist() for v in sharded]


def initial_values(what):
    """Variables' values, and those of plain ones, by this worker's draws."""
    strategy = in_cluster(what)
    with strategy.scope():
        values = drawn(strategy.plan.cluster.index)
    return values, drawn(strategy.plan.cluster.index)


def drawn(seed):
    """Variables' values, drawn in several ways by a seed."""
    keras.utils.set_random_seed(seed)
    numbers = np.random.default_rng(seed)
    ways = (
        "glorot_uniform",
        keras.initializers.RandomNormal(seed=seed),
        lambda shape, dtype: numbers.normal(size=shape).astype(dtype),
    )
    made = [keras.Variable(way, shape=(7, 3), dtype="float32") for way in ways]
    made.append(keras.Variable(numbers.normal(size=(7, 3))))
    return [to_numpy(variable) for variable in made]


def different_variables(what):
    """Makes a variable of another shape on each worker."""
    strategy = in_cluster(what)
    width = 3 + strategy.plan.cluster.index
    with strategy.scope():
        keras.Variable("glorot_uniform", shape=(7, width))


def apart(what, way):
    """Reads or assigns variables otherwise than the other worker does."""
    strategy = in_cluster(what)
    is_chief = strategy.plan.is_chief
    with strategy.scope():
        first, second = (keras.Variable(np.full((4, 4), i)) for i in (1.0, 2.0))
        model = compiled(strategy)
    if way == "swapped":
        (first if is_chief else second).numpy()
    elif way == "read":
        reads = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: (
                is_chief and model.get_weights()
            )
        )
        fit(model, callbacks=[reads])
    elif way == "saved":
        saves = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: (
                is_chief and model.save_weights("/never/x.weights.h5")
            )
        )
        fit(model, callbacks=[saves])
    elif way == "saved in parts":
        saves = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: (
                is_chief and keras_dist.save_sharded(model, "/never/parts")
            )
        )
        fit(model, callbacks=[saves])
    elif way == "assigned alone" and is_chief:
        first.assign(np.full((4, 4), 5.0))
    elif way == "assigned alone":
        fit(model)


def assigned(what):
    """A variable's values after each worker has assigned its own value."""
    strategy = in_cluster(what)
    with strategy.scope():
        variable = keras.Variable(np.zeros((4, 4)))
    variable.assign(np.full((4, 4), 5.0 + strategy.plan.cluster.index))
    return np.unique(variable.numpy()).tolist()


def refused_on_one_gpu():
    """PyTorch: errors of updates, were all workers on one GPU."""
    strategy = in_cluster()
    workers = strategy.executor.workers
    x, y = np.ones((6, 4), "float32"), np.ones((6, 3), "float32")
    found = []
    for optimizer, constraint in (
        ("adam", None),
        (keras.optimizers.Lamb(), None),
        ("adam", keras.constraints.NonNeg()),
    ):
        with strategy.scope():
            model = keras.Sequential(
                [keras.layers.Dense(3, kernel_constraint=constraint)]
            )
            model.compile(optimizer, "mse")
        with mock.patch.object(workers, "may_share_tensors") as may_share:
            may_share.return_value = False
            try:
                model.train_on_batch(x, y)
                found.append("")
            except ClusterError as error:
                found.append(str(error))
    return found


class Raises(keras.constraints.Constraint):
    """Fails in the middle of an update, if it is told to."""

    fails = False

    def __call__(self, w):
        if self.fails:
            raise ArithmeticError("in the middle")
        return w


def weights_after_a_failed_update():
    """The weights after an update that failed, and after the next one."""
    strategy = in_cluster()
    constraint = Raises()
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Dense(5, kernel_constraint=constraint)]
        )
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    x, y = np.ones((6, 4), "float32"), np.ones((6, 5), "float32")
    model.train_on_batch(x, y)
    constraint.fails, found = True, []
    with contextlib.suppress(ArithmeticError):
        model.train_on_batch(x, y)
        raise AssertionError("it has not failed")
    found.append(model.get_weights())
    constraint.fails = False
    model.train_on_batch(x, y)
    return [*found, model.get_weights()]


def refused_outside_of_steps():
    """PyTorch: errors of updates with gradients that can't be right."""
    strategy = in_cluster()
    index = strategy.plan.cluster.index
    with strategy.scope():
        variable = keras.Variable(np.zeros((6, 8), "float32"), name="v")
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build([variable])
    found = [
        attempted(optimizer.apply, [gradient], [variable])
        for gradient in (
            keras.ops.ones((12, 8)),
            np.ones((6, 8)),
            keras.ops.full((6, 8), 1.0 + index),
        )
    ]
    optimizer.apply([keras.ops.ones((6, 8))], [variable])
    return [*found, np.unique(variable.numpy()).tolist()]


class Flattens(keras.optimizers.SGD):
    """Does what `DTensor` can't do with parts of different sizes."""

    def update_step(self, gradient, variable, learning_rate):
        largest = keras.ops.max(keras.ops.reshape(gradient, (-1,)))
        self.assign_sub(variable, gradient / largest)


def beyond_dtensor():
    """PyTorch: the error of such an optimizer; and whether a user's own
    `implicit_replication` is as it was after a step of another one."""
    from torch.distributed.tensor.experimental import implicit_replication

    from keras_dist_torch.dtensor_internals import dispatcher

    strategy = in_cluster()
    x, y = np.ones((6, 7), "float32"), np.ones((6, 5), "float32")
    models = []
    for optimizer in Flattens(0.1), keras.optimizers.Adam():
        with strategy.scope():
            models.append(keras.Sequential([keras.layers.Dense(5)]))
            models[-1].compile(optimizer, "mse")
    error = attempted(models[0].train_on_batch, x, y)
    with implicit_replication():
        models[1].train_on_batch(x, y)
        is_on = dispatcher._allow_implicit_replication
    models[1].train_on_batch(x, y)
    return error, is_on, dispatcher._allow_implicit_replication


def bytes_of_slots(limits):
    """PyTorch: what a model with Adam adds to the bytes of all tensors, with
    its slots in parts, and whole; then what is largest with parts."""
    from workers.sharded_variables_jobs import bytes_of_tensors
    from workers.sharded_variables_jobs import bytes_once_freed
    from workers.sharded_variables_jobs import memory_of_tensors

    found = []
    strategies = in_cluster(), keras_dist.MultiWorkerMirroredStrategy()
    for strategy, limit in zip(strategies, limits, strict=True):
        before = bytes_of_tensors()
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((1000,)), keras.layers.Dense(1000)]
            )
            model.compile("adam", "mse")
        x = np.zeros((8, 1000), "float32")
        model.fit(x, x, batch_size=4, verbose=0)
        for variable in model.trainable_variables:
            variable.value.grad = None
        model.optimizer.variables[2].numpy()
        found.append(bytes_once_freed(before + limit) - before)
        if len(found) == 1:
            largest = memory_of_tensors()[:12]
        del x, model, variable
    return *found, largest


def collectives(optimizer_options, initial_scale=None, least_elements=1):
    """PyTorch: the collectives of one step, by kind."""
    from torch.distributed.tensor.debug import CommDebugMode

    from keras_dist_torch import parts

    strategy = in_cluster()
    parts.LEAST_ELEMENTS = least_elements
    optimizer = keras.optimizers.Adam(**optimizer_options)
    if initial_scale:
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=initial_scale
        )
    with strategy.scope():
        model = network()
        model.compile(optimizer, "mse")
    x, y = np.ones((6, 4), "float32"), np.ones((6, 3), "float32")
    model.train_on_batch(x, y)
    workers = strategy.executor.workers
    found = {}
    for name in ("scatter_sum", "gather_flat", "start_sum"):
        setattr(workers, name, _counted(getattr(workers, name), name, found))
    exchange = workers.exchange

    def counting(call, *args):
        found.setdefault("exchange", []).append(call.text)
        return exchange(call, *args)

    workers.exchange = counting
    with CommDebugMode() as of_tensors:
        model.train_on_batch(x, y)
    found["by DTensor"] = of_tensors.get_total_counts()
    return found


def _counted(method, name, found):
    def counting(*args):
        found.setdefault(name, []).append(args[-1].numel())
        return method(*args)

    return counting
