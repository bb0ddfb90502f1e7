"""What workers run in `test_sharded_variables.py`."""

import keras
import numpy as np

import keras_dist
from parity import cases
from parity import harness
from workers import sharded_models
from workers.jobs import attempted


def in_cluster(least_elements=1):
    """The strategy under which this worker trains from now on."""
    from keras_dist_torch import parts

    parts.LEAST_ELEMENTS = least_elements
    strategy = keras_dist.MultiWorkerMirroredStrategy(variables="sharded")
    harness.strategy = lambda num_replicas: strategy
    return strategy


def train_case(name):
    """The outcome of a case of the parity table."""
    count = in_cluster().num_replicas_in_sync
    (case,) = (case for case in cases.CASES if case.name == name)
    return harness.train(case, count, harness.strategy)


def train_cases(names):
    return [attempted(train_case, name) for name in names]


def run_program(name, optimizer):
    """What a program computes on this worker."""
    strategy = in_cluster(least_elements=64)
    return sharded_models.PROGRAMS[name](strategy.scope(), optimizer)
