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


def _slices():
    data = models.weighted_table(ROWS)
    return [
        tuple(value[start : start + BATCH_SIZE] for value in data.values())
        for start in range(0, ROWS, BATCH_SIZE)
    ]


class Batches(keras.utils.PyDataset):
    """A `PyDataset` of given batches."""

    def __init__(self, batches, **kwargs):
        super().__init__(**kwargs)
        self._batches = batches

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        return self._batches[index]


def from_numpy():
    return models.weighted_table(ROWS), {
        "batch_size": BATCH_SIZE,
        "shuffle": True,
    }


def from_tensors():
    data = models.weighted_table(ROWS)
    data = {k: keras.ops.convert_to_tensor(v) for k, v in data.items()}
    return data, {"batch_size": BATCH_SIZE, "shuffle": False}


def from_py_dataset():
    return {"x": Batches(_slices())}, {"shuffle": True}


def from_py_dataset_workers():
    dataset = Batches(_slices(), workers=2, max_queue_size=3)
    return {"x": dataset}, {"shuffle": False}


def from_generator():
    # It ends when it was read once, so both epochs are in it.
    batches = (batch for batch in _slices() * 2)
    return {"x": batches}, {"steps_per_epoch": 3, "shuffle": False}


def from_tf_data():
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(
        tuple(models.weighted_table(ROWS).values())
    )
    dataset = dataset.shuffle(ROWS, seed=1, reshuffle_each_iteration=True)
    validation = tf.data.Dataset.from_tensor_slices(
        tuple(models.table(5).values())
    )
    return {"x": dataset.batch(BATCH_SIZE).prefetch(2)}, {
        "validation_data": validation.batch(2),
        "shuffle": False,
    }


def from_torch_loader():
    import torch

    columns = models.weighted_table(ROWS).values()
    dataset = torch.utils.data.TensorDataset(
        *(torch.from_numpy(column) for column in columns)
    )
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
    )
    return {"x": loader}, {"shuffle": False}


def _grain_rows():
    import grain

    columns = models.weighted_table(ROWS).values()
    rows = list(zip(*columns, strict=True))
    rows = [(x, y, np.float32(weight)) for x, y, weight in rows]
    return grain.MapDataset.source(rows)


def from_grain_map():
    dataset = _grain_rows().shuffle(seed=2).batch(BATCH_SIZE)
    return {"x": dataset}, {"shuffle": False}


def from_grain_iter():
    dataset = _grain_rows().to_iter_dataset().batch(BATCH_SIZE)
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
