"""The same small batches as every kind of data that Keras takes."""

import keras
import numpy as np

from parity import models
from parity.harness import JIT
from parity.harness import fitted
from parity.harness import scope
from parity.harness import set_initial_weights

ROWS, BATCH_SIZE = 19, 7


def compiled(model):
    model.compile("sgd", "mse", weighted_metrics=["mae"], jit_compile=JIT)
    return model


def outcome_of(make, num_replicas):
    """Two epochs of training.

    Args:
        make: Callable that returns the data as keyword arguments of `fit`,
            and its other arguments.
        num_replicas: Integer, or `None` for plain Keras.

    Returns:
        Dict of arrays.
    """
    keras.utils.set_random_seed(17)
    with scope(num_replicas):
        model = compiled(set_initial_weights(models.mlp()))
    data, options = make()
    return fitted(model, **data, **{"epochs": 2, **options}, verbose=0)


def slices(columns, batch_size=BATCH_SIZE):
    """Batches of a nest of arrays, as a list."""
    rows = len(keras.tree.flatten(columns)[0])
    return [
        keras.tree.map_structure(
            lambda column, start=start: column[start : start + batch_size],
            columns,
        )
        for start in range(0, rows, batch_size)
    ]


class Batches(keras.utils.PyDataset):
    """A `PyDataset` of given batches, which counts its epochs."""

    def __init__(self, batches, **kwargs):
        super().__init__(**kwargs)
        self._batches = batches
        self.epochs = 0

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        return self._batches[index]

    def on_epoch_end(self):
        self.epochs += 1


def tf_rows(columns):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(columns)


def torch_loader(columns, **options):
    import torch

    dataset = torch.utils.data.TensorDataset(*map(torch.from_numpy, columns))
    return torch.utils.data.DataLoader(dataset, **options)


def grain_rows(columns):
    import grain

    return grain.MapDataset.source(
        [tuple(map(np.asarray, row)) for row in zip(*columns, strict=True)]
    )


def _columns():
    return tuple(models.weighted_table(ROWS).values())


def from_numpy():
    data = models.weighted_table(ROWS)
    return data, {"batch_size": BATCH_SIZE, "shuffle": True}


def from_tensors():
    data = models.weighted_table(ROWS)
    data = {k: keras.ops.convert_to_tensor(v) for k, v in data.items()}
    return data, {"batch_size": BATCH_SIZE, "shuffle": False}


def from_py_dataset():
    return {"x": Batches(slices(_columns()))}, {"shuffle": True}


def from_py_dataset_workers():
    dataset = Batches(slices(_columns()), workers=2, max_queue_size=3)
    return {"x": dataset}, {"shuffle": False}


def from_generator():
    # It ends when it was read once, so both epochs are in it.
    batches = (batch for batch in slices(_columns()) * 2)
    return {"x": batches}, {"steps_per_epoch": 3, "shuffle": False}


def from_tf_data():
    dataset = tf_rows(_columns()).shuffle(
        ROWS, seed=1, reshuffle_each_iteration=True
    )
    validation = tf_rows(tuple(models.table(5).values())).batch(2)
    return {"x": dataset.batch(BATCH_SIZE).prefetch(2)}, {
        "validation_data": validation,
        "shuffle": False,
    }


def from_torch_loader():
    import torch

    generator = torch.Generator().manual_seed(1)
    options = {"batch_size": BATCH_SIZE, "shuffle": True}
    loader = torch_loader(_columns(), generator=generator, **options)
    return {"x": loader}, {"shuffle": False}


def from_grain_map():
    dataset = grain_rows(_columns()).shuffle(seed=2).batch(BATCH_SIZE)
    return {"x": dataset}, {"shuffle": False}


def from_grain_iter():
    dataset = grain_rows(_columns()).to_iter_dataset().batch(BATCH_SIZE)
    return {"x": dataset}, {"shuffle": False}


KINDS = {
    "numpy": from_numpy,
    "tensors": from_tensors,
    "py_dataset": from_py_dataset,
    "py_dataset_workers": from_py_dataset_workers,
    "generator": from_generator,
    "tf_data": from_tf_data,
    "torch_loader": from_torch_loader,
    "grain_map": from_grain_map,
    "grain_iter": from_grain_iter,
}
