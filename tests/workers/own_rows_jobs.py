"""Jobs of workers that load their own rows, and data that counts them."""

import collections
import contextlib
import importlib.util
import io
import os
import threading
import time

import keras
import numpy as np

import keras_dist
from parity import models
from parity.harness import BACKEND
from parity.harness import JIT
from parity.harness import fitted
from parity.harness import flat
from parity.harness import scope
from parity.harness import set_initial_weights
from parity.harness import to_numpy
from parity.kinds import tf_rows
from workers import jobs

HAS_TORCH = importlib.util.find_spec("torch") is not None
# The last batch has one row: fewer than there are workers.
ROWS, BATCH_SIZE = 19, 6
X, Y, WEIGHTS = models.weighted_table(ROWS).values()


class Loads:
    """The sizes of the batches that were loaded, also by processes."""

    def __init__(self):
        self._lock = threading.Lock()
        self.sizes = []

    def add(self, size):
        with self._lock:
            self.sizes.append(size)


class SharedLoads:
    """The same, where processes load."""

    def __init__(self):
        import torch

        # A row for each process: additions to one of them could be lost.
        self._counts = torch.zeros((2, BATCH_SIZE + 1), dtype=torch.int64)
        self._counts.share_memory_()

    def add(self, size):
        import torch

        process = torch.utils.data.get_worker_info()
        self._counts[process.id if process else 0, size] += 1

    @property
    def sizes(self):
        return [
            size
            for size, count in enumerate(self._counts.sum(0).tolist())
            for _ in range(count)
        ]


class Table(keras.utils.PyDataset):
    """Rows of a table, of which `own` chooses."""

    def __init__(self, loads, rows=ROWS, **options):
        super().__init__(**options)
        self._loads, self._rows = loads, rows

    def __len__(self):
        return -(-self._rows // BATCH_SIZE)

    def __getitem__(self, index, own=lambda rows: rows):
        start = index * BATCH_SIZE
        ids = own(np.arange(start, min(start + BATCH_SIZE, self._rows)))
        self._loads.add(len(ids))
        return X[ids], Y[ids], WEIGHTS[ids]


class WithoutParameter(Table):
    def __getitem__(self, index):
        return super().__getitem__(index)


def rows_of(loads, rows=ROWS):
    """A map-style dataset of PyTorch."""
    import torch

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return rows

        def __getitems__(self, ids):
            loads.add(len(ids))
            return [(X[i], Y[i], WEIGHTS[i]) for i in ids]

    return Rows()


def loader(loads, rows=ROWS, **options):
    import torch

    if not {"batch_sampler", "sampler"} & options.keys():
        options = {"shuffle": True} | options
    if "batch_sampler" not in options:
        options = {"batch_size": BATCH_SIZE} | options
    return torch.utils.data.DataLoader(rows_of(loads, rows), **options)


def from_py_dataset(loads):
    return Table(loads), {"shuffle": True}


def from_threads(loads):
    return Table(loads, workers=2, max_queue_size=2), {"shuffle": True}


def from_loader(loads):
    return loader(loads), {"shuffle": False}


def from_loader_with_processes(loads):
    return loader(loads, num_workers=2, persistent_workers=True), {
        "shuffle": False
    }


def from_weighted_loader(loads):
    import torch

    sampler = torch.utils.data.WeightedRandomSampler(WEIGHTS, ROWS)
    return loader(loads, sampler=sampler, drop_last=True), {"shuffle": False}


def from_endless_loader(loads):
    import torch

    if BACKEND == "tensorflow":
        loads = Loads()  # it reads ahead as far as it likes
    sampler = torch.utils.data.RandomSampler(
        range(ROWS), replacement=True, num_samples=10**6
    )
    return loader(loads, sampler=sampler), {
        "steps_per_epoch": 3,
        "shuffle": False,
    }


def from_loader_of_batches(loads):
    batches = [[3, 1, 4], [15], [9, 2, 6, 5, 8], [0, 7]]
    return loader(loads, batch_sampler=batches), {"shuffle": False}


def from_marked_loader(loads):
    import torch

    made = loader(
        loads, collate_fn=lambda rows: torch.utils.data.default_collate(rows)
    )
    made.own_rows = True
    return made, {"shuffle": False}


class Counted(list):
    """Rows that are loaded together."""

    loads = None

    def __getitems__(self, ids):
        self.loads.add(len(ids))
        return [self[i] for i in ids]


def from_rows(loads):
    source = Counted(zip(X, Y, WEIGHTS, strict=True))
    source.loads = loads
    rows = keras_dist.Rows(source, batch_size=BATCH_SIZE, shuffle=True)
    return rows, {"shuffle": False}


SOURCES = {
    "rows": from_rows,
    "py_dataset": from_py_dataset,
    "threads": from_threads,
}
if HAS_TORCH:
    SOURCES |= {
        "loader": from_loader,
        "weighted_loader": from_weighted_loader,
        "endless_loader": from_endless_loader,
        "loader_of_batches": from_loader_of_batches,
        "marked_loader": from_marked_loader,
    }
if BACKEND == "torch":  # forked processes of others may hang
    SOURCES["loader_with_processes"] = from_loader_with_processes


def whole_py_dataset(loads):
    return WithoutParameter(loads), {"shuffle": True}


def whole_collated(loads):
    made, options = from_marked_loader(loads)
    del made.own_rows
    return made, options


# Of these, each worker reads all rows.
WHOLE = {"py_dataset": whole_py_dataset}
if HAS_TORCH:
    WHOLE["collated"] = whole_collated


def seeded(seed=17):
    keras.utils.set_random_seed(seed)
    if HAS_TORCH:
        import torch

        torch.manual_seed(seed)


def made_model(num_replicas):
    with scope(num_replicas):
        model = set_initial_weights(models.mlp())
        model.compile("sgd", "mse", weighted_metrics=["mae"], jit_compile=JIT)
    return model


def outcomes(names, num_replicas, table=SOURCES):
    """Results and loads of each source, of one model that begins anew.

    Args:
        names: Sequence of keys of `table`.
        num_replicas: Integer, or `None` for plain Keras.
        table: Dict of the functions that make data.

    Returns:
        Dict from a name to a pair: a dict of arrays, and lists of the sizes of
        the batches that `fit`, `evaluate` and `predict` have loaded.
    """
    model = made_model(num_replicas)
    return {name: _outcome(model, table[name]) for name in names}


def _outcome(model, make):
    seeded()
    set_initial_weights(model)
    shared = make is from_loader_with_processes
    loads = [SharedLoads() if shared else Loads() for _ in range(3)]
    data, more = make(loads[0])
    validation = Table(loads[0], 7)
    results = fitted(
        model, data, validation_data=validation, epochs=2, verbose=0, **more
    )
    steps = {"steps": 3} if "steps_per_epoch" in more else {}
    data, _ = make(loads[1])
    logs = model.evaluate(data, verbose=0, return_dict=True, **steps)
    results |= flat("evaluate", logs)
    data, _ = make(loads[2])
    predicted = model.predict(data, verbose=0, **steps)
    results |= {"predict": to_numpy(predicted)}
    return results, [sizes.sizes for sizes in loads]


@contextlib.contextmanager
def environment(**values):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def own(names, table="SOURCES", **variables):
    """The outcomes of some sources, of all workers together."""
    count = jobs.in_cluster().num_replicas_in_sync
    with environment(**variables):
        return outcomes(names, count, globals()[table])


def with_tf_data(num_replicas, strategy=None):
    """Results of `fit` and its relatives on tf.data, and the rows loaded."""
    import tensorflow as tf

    loads = Loads()

    def row(index):
        loads.add(int(index))
        return X[index], Y[index], WEIGHTS[index]

    def load(index):
        values = tf.py_function(row, [index], [tf.float32] * 3)
        for value, array in zip(values, (X, Y, WEIGHTS), strict=True):
            value.set_shape(array.shape[1:])
        return tuple(values)

    seeded()
    indices = tf.data.Dataset.range(ROWS).shuffle(ROWS, seed=2)
    data = indices.map(load).batch(BATCH_SIZE)
    if strategy is not None:
        data = indices.apply(strategy.own_rows(BATCH_SIZE, load)).prefetch(1)
    model = made_model(num_replicas)
    results = fitted(model, data, epochs=2, shuffle=False, verbose=0)
    loads.sizes.clear()
    logs = model.evaluate(data, verbose=0, return_dict=True)
    results |= flat("evaluate", logs)
    loaded = sorted(loads.sizes)
    results |= {"predict": to_numpy(model.predict(data, verbose=0))}
    return results, loaded


def own_tf_data():
    strategy = jobs.in_cluster()
    return with_tf_data(strategy.num_replicas_in_sync, strategy)


def _arrays_of(pipeline):
    """Twelve rows for each of two pipelines, in turn."""
    return tuple(np.concatenate([a, a])[pipeline:24:2] for a in (X, Y))


def with_functions(num_replicas, strategy=None):
    """Results of data that a function makes, and for which workers it did.

    All steps have six rows of each worker, or the last one has fewer.
    """
    results = {}
    model = made_model(num_replicas)
    for name, size in (("whole", 6), ("partial", 8), ("eager", 6)):
        called = []

        def make(context, name=name, size=size, called=called):
            index = context.input_pipeline_id
            called.append(index)
            arrays = _arrays_of(index)
            rows = strategy.experimental_make_numpy_dataset(arrays)
            size = context.get_per_replica_batch_size(2 * size)
            return rows.batch(size, drop_remainder=name != "partial")

        set_initial_weights(model)
        model.run_eagerly = name == "eager"
        if strategy is None:
            data = SideBySide([_arrays_of(i) for i in range(2)], size)
        else:
            data = strategy.distribute_datasets_from_function(make)
        outcome = fitted(model, data, epochs=2, shuffle=False, verbose=0)
        logs = model.evaluate(data, verbose=0, return_dict=True)
        predicted = model.predict(data, verbose=0)
        outcome |= flat("evaluate", logs) | {"predict": to_numpy(predicted)}
        results[name] = outcome, sorted(set(called))
    return results


class SideBySide(keras.utils.PyDataset):
    """The batches of several pipelines side by side."""

    def __init__(self, pipelines, size):
        super().__init__()
        self._pipelines, self._size = pipelines, size

    def __len__(self):
        return -(-len(self._pipelines[0][0]) // self._size)

    def __getitem__(self, index):
        rows = slice(index * self._size, (index + 1) * self._size)
        columns = zip(*self._pipelines, strict=True)
        return tuple(np.concatenate([a[rows] for a in c]) for c in columns)


def own_functions():
    strategy = jobs.in_cluster()
    return with_functions(strategy.num_replicas_in_sync, strategy)


def misused_tf_data():
    """What is said of a dataset of own rows where it can't be used."""
    strategy = jobs.in_cluster()
    count = strategy.num_replicas_in_sync

    def fit(worker=0, plain=False, **options):
        with scope(None if plain else count):
            model = set_initial_weights(models.mlp())
            model.compile("sgd", "mse", **options)
        rows = tf_rows((np.roll(X, worker, 0), Y))
        data = rows.apply(strategy.own_rows(BATCH_SIZE))
        return jobs.attempted(lambda: model.predict(data, verbose=0))

    worker = strategy.cluster_resolver.task_id
    return fit(run_eagerly=True), fit(worker), fit(plain=True)


def banners():
    """The line of the first `fit`, for data of three kinds."""
    lines = []
    for data, variables in (
        (Table(Loads()), {}),
        (WithoutParameter(Loads()), {}),
        (Table(Loads()), {"KERAS_DIST_OWN_ROWS": "0"}),
    ):
        jobs.in_cluster()
        model = made_model(2)
        printed = io.StringIO()
        with environment(**variables), contextlib.redirect_stdout(printed):
            model.fit(data, verbose=2)
        lines += printed.getvalue().splitlines()[:1]
    return lines


def with_arrays(num_replicas, options):
    """Results of `fit` and its relatives on arrays, by the options' names."""
    model = made_model(num_replicas)
    results = {}
    for name, given in options.items():
        seeded()
        set_initial_weights(model)
        results[name] = (
            fitted(model, X, Y, epochs=2, verbose=0, **given)
            | flat(
                "evaluate",
                model.evaluate(X, Y, BATCH_SIZE, verbose=0, return_dict=True),
            )
            | {"predict": to_numpy(model.predict(X, BATCH_SIZE, verbose=0))}
        )
    return results


def own_arrays(options):
    return with_arrays(jobs.in_cluster().num_replicas_in_sync, options)


class Watched(np.ndarray):
    """An array that notes which rows steps take of it."""

    taken = collections.deque()

    def __getitem__(self, index):
        if isinstance(index, (slice, list, np.ndarray)):
            rows = np.arange(len(self))[index]
            self.taken.append(rows.tolist())
        return np.asarray(self)[index]


def taken_of_array(shuffle):
    """The rows that steps took of an array, batch by batch."""
    model = made_model(jobs.in_cluster().num_replicas_in_sync)
    x = X.view(Watched)
    Watched.taken.clear()
    seeded()
    model.fit(x, Y, batch_size=BATCH_SIZE, shuffle=shuffle, verbose=0)
    return list(Watched.taken)


class Drawing(Table):
    """A `PyDataset` that adds noise from global generators."""

    def __init__(self, seen):
        super().__init__(Loads())
        self._seen = seen

    def __getitem__(self, index, own=lambda rows: rows):
        x, *rest = super().__getitem__(index, own)
        noise = np.random.normal(size=x.shape)
        self._seen.append(noise[0].tolist())
        return x + noise.astype("float32"), *rest


def drawn():
    """What workers drew to load rows, the weights, and what is drawn next."""
    count = jobs.in_cluster().num_replicas_in_sync
    runs = []
    for _ in range(2):
        seeded()
        model = made_model(count)
        seen = []
        model.fit(Drawing(seen), epochs=2, shuffle=True, verbose=0)
        runs.append((seen, float(np.random.uniform())))
    return runs


def eager_after_all():
    """Results of a model whose `run_eagerly` changes between its calls."""
    model = made_model(jobs.in_cluster().num_replicas_in_sync)
    results = {}
    for run_eagerly in (True, False, True, False):
        model.run_eagerly = run_eagerly
        name = f"{len(results)}"
        results[name] = np.asarray(
            model.evaluate(X, Y, BATCH_SIZE, verbose=0), "float64"
        )
    return results


class Late(Table):
    """Whose rows come later on one of the workers."""

    def __init__(self, worker, **options):
        super().__init__(Loads(), **options)
        self._seconds = 0.02 * worker

    def __getitem__(self, index, own=lambda rows: rows):
        time.sleep(self._seconds)
        return super().__getitem__(index, own)


def parts_of_passes():
    """What `fit` says of epochs that are shorter than a pass, if anything."""
    strategy = jobs.in_cluster()
    worker = strategy.cluster_resolver.task_id
    model = made_model(strategy.num_replicas_in_sync)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    def fit(**options):
        return model.fit(Late(worker), shuffle=False, verbose=0, **options)

    told = []
    for options in (
        {"epochs": 3, "steps_per_epoch": 1},
        {
            "epochs": 3,
            "validation_data": Late(worker),
            "validation_steps": 2,
        },
        {"epochs": 2, "callbacks": [Stop()]},
    ):
        said = jobs.attempted(lambda options=options: fit(**options))
        told.append(said if isinstance(said, str) else "")
    return told


class Drifting(Table):
    """Whose order is another one on each worker, from the second batch on."""

    def __init__(self, worker):
        super().__init__(Loads())
        self._order = np.arange(ROWS)
        self._order[BATCH_SIZE:] = np.roll(self._order[BATCH_SIZE:], worker)

    def __getitem__(self, index, own=lambda rows: rows):
        start = index * BATCH_SIZE
        ids = own(self._order[start : start + BATCH_SIZE])
        return X[ids], Y[ids], WEIGHTS[ids]


class Others(Table):
    """Whose rows have the same indices and other values on each worker."""

    def __init__(self, worker, **options):
        super().__init__(Loads(), **options)
        self._worker = worker

    def __getitem__(self, index, own=lambda rows: rows):
        x, *rest = super().__getitem__(index, own)
        return x + self._worker, *rest


def other_values(kind):
    """What `predict` says of the same indices with other values."""
    strategy = jobs.in_cluster()
    worker = strategy.cluster_resolver.task_id
    model = made_model(strategy.num_replicas_in_sync)
    if kind == "loader":
        import torch

        rows = [(x + worker,) for x in X]
        data = torch.utils.data.DataLoader(rows, batch_size=BATCH_SIZE)
    elif kind == "threads":
        data = Others(worker, workers=2)
    else:
        data = Others(worker)
    return jobs.attempted(lambda: model.predict(data, verbose=0))


def drifting(kind):
    """What `fit` says of data whose order differs between workers."""
    strategy = jobs.in_cluster()
    worker = strategy.cluster_resolver.task_id
    model = made_model(strategy.num_replicas_in_sync)
    if kind == "py_dataset":
        data = Drifting(worker)
    else:
        first = list(range(BATCH_SIZE))
        rest = np.roll(np.arange(BATCH_SIZE, ROWS), worker).tolist()
        data = loader(Loads(), batch_sampler=[first, rest[:6], rest[6:]])
    return jobs.attempted(
        lambda: model.fit(data, epochs=2, shuffle=False, verbose=0)
    )


def beside_a_plain_model():
    """What a plain model predicts in a callback, of what it predicts alone."""
    model = made_model(jobs.in_cluster().num_replicas_in_sync)
    plain = set_initial_weights(models.mlp())
    alone = plain.predict(X, batch_size=BATCH_SIZE, verbose=0)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(plain.predict(X, batch_size=BATCH_SIZE, verbose=0))

    model.fit(
        X, Y, batch_size=BATCH_SIZE, verbose=0, epochs=2, callbacks=[Look()]
    )
    return [float(np.abs(one - alone).max()) for one in seen]
