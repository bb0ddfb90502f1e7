"""What workers run in `test_workers_faults.py`: a script for one of them.

Usage: worker_faults.py INDEX ADDRESS,ADDRESS,... KIND VICTIM TIMEOUT

KIND is "end", or "raise": the victim fails in the middle of training. TIMEOUT
is that of the options; with "-", silent workers are lost after two seconds.
"""

import dataclasses
import sys
import time

import keras

from keras_dist.core.options import CommunicationOptions
from keras_dist.core.plan import Cluster
from keras_dist.core.plan import Plan
from keras_dist.errors import ClusterError
from keras_dist.plugin.backend import get_backend
from keras_dist.strategies.strategy import Strategy
from keras_dist_tensorflow import cluster as cluster_module
from keras_dist_tensorflow import workers as workers_module


class WorkerStrategy(Strategy):
    """A replica on each device of each worker."""


def train(strategy, each_batch):
    """Trains for longer than any test waits."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    x, y = keras.ops.ones((4, 3)), keras.ops.ones((4, 2))
    steps = keras.callbacks.LambdaCallback(on_train_batch_end=each_batch)
    model.fit(x, y, batch_size=4, epochs=10**6, verbose=0, callbacks=[steps])


def main(index, addresses, kind, victim, timeout):
    index, addresses = int(index), tuple(addresses.split(","))
    if timeout == "-":
        cluster_module.SILENCE = 2.0
    options = CommunicationOptions(
        timeout_seconds=None if timeout == "-" else float(timeout)
    )
    # How long one that has ended waits for the others.
    workers_module.PARTING = 200.0
    cluster = Cluster(index, addresses[0], addresses)
    backend = get_backend()
    backend.join(cluster, options)
    devices = tuple(backend.list_devices())
    strategy = WorkerStrategy(
        Plan(tuple((d,) for d in devices), devices, cluster)
    )
    count = 0

    def each_batch(batch, logs):
        nonlocal count
        count += 1
        if count == 3:
            print("training", flush=True)
        if count < 10 or index != int(victim):
            return
        raise ValueError("the data is bad")

    if kind == "end":
        # The chief is first to end: the others still need its server.
        train_briefly(strategy)
        check_joining_again(backend, cluster)
        time.sleep(index * 1.0)  # so that workers end one after the other
        return
    train(strategy, each_batch)


def check_joining_again(backend, cluster):
    backend.join(dataclasses.replace(cluster), CommunicationOptions())
    other = dataclasses.replace(cluster, restarts=1)
    try:
        backend.join(other, CommunicationOptions())
    except ClusterError as error:
        assert "belongs to one cluster" in str(error)
        print("refused another cluster")


def train_briefly(strategy):
    print(float(strategy.reduce("SUM", keras.ops.ones(()), axis=None)))


if __name__ == "__main__":
    main(*sys.argv[1:])
