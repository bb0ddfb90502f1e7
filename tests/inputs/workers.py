"""Several workers in one process: threads with collectives of their own."""

import threading

import numpy as np

import keras_dist
from inputs.helpers import parts
from keras_dist.core.device import Device
from keras_dist.core.options import CommunicationOptions
from keras_dist.core.plan import Cluster
from keras_dist.core.plan import Plan
from keras_dist.plugin.backend import override_backend
from keras_dist.plugin.workers import Workers
from keras_dist.testing import MemoryBackend

# Longer than any step of these tests takes.
TIMEOUT = 60.0


class Table:
    """Where threads put things down, and pick up everybody's."""

    def __init__(self, count):
        self._barrier = threading.Barrier(count, timeout=TIMEOUT)
        self._slots = [None] * count

    def exchange(self, index, value):
        self._slots[index] = value
        self._barrier.wait()
        everyone = list(self._slots)
        self._barrier.wait()
        return everyone


class ThreadWorkers(Workers):
    """Collectives of threads, which count themselves.

    Args:
        cluster: The `Cluster`.
        table: The `Table` of all of them.

    Attributes:
        num_collectives: Integer, how many there have been.
    """

    def __init__(self, cluster, table):
        super().__init__(cluster, CommunicationOptions())
        self._table = table
        self.num_collectives = 0

    def swap(self, own):
        self.num_collectives += 1
        return np.stack(self._table.exchange(self.cluster.index, own))


def strategies_of(num_workers, num_replicas=1):
    """The strategy of each worker, with so many replicas on each."""
    addresses = tuple(f"127.0.0.1:{9000 + i}" for i in range(num_workers))
    devices = tuple(Device("cpu", i) for i in range(num_replicas))
    replicas = tuple((device,) for device in devices)
    table = Table(num_workers)
    made = []
    with override_backend(MemoryBackend(devices)):
        for index in range(num_workers):
            cluster = Cluster(index, addresses[0], addresses)
            strategy = keras_dist.Strategy(Plan(replicas, devices, cluster))
            if num_workers > 1:
                strategy.executor.workers = ThreadWorkers(cluster, table)
            made.append(strategy)
    return made


def on_workers(strategies, fn):
    """What `fn(strategy)` returns, or raises, on each worker at once."""
    outcomes = [None] * len(strategies)

    def work(index, strategy):
        try:
            outcomes[index] = fn(strategy)
        except Exception as error:
            outcomes[index] = error

    threads = [
        threading.Thread(target=work, args=each)
        for each in enumerate(strategies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def on_all(strategies, fn):
    """What `fn(strategy)` returns on each worker; raises what one raises."""
    outcomes = on_workers(strategies, fn)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def read(data):
    """Steps, in each the rows of each local replica, as lists."""
    return [[part.tolist() for part in parts(step)] for step in data]


def read_global(data):
    """What `fit` reads, as lists of rows."""
    batches = data.global_batches().get_numpy_iterator()
    return [np.asarray(batch[0]).tolist() for batch in batches]


def joined_steps(per_worker):
    """For each step, the rows of all replicas, in order."""
    return [
        [row for own in step for part in own for row in part]
        for step in zip(*per_worker, strict=True)
    ]
