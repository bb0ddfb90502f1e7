"""A script whose workers are told to end; see `test_preemption.py`.

Each life of the workers goes on with the case that the last one ended in.
"""

import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np

import keras_dist
from keras_dist.experimental import PreemptionCheckpointHandler
from keras_dist.experimental import TerminationConfig

CALLS = 6
GRACE_PERIOD = 1.5


def data():
    x = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def compiled():
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


class Counter:
    """A variable that can be saved under a name; it notes when it is."""

    def __init__(self, folder, index):
        self.variable = keras.Variable(0.0, aggregation="sum")
        self.folder, self.index = folder, index

    def save(self, path):
        pathlib.Path(f"{path}.txt").write_text(str(float(self.variable)))
        with open(self.folder / f"saved-by-{self.index}", "a") as file:
            file.write(f"{float(self.variable)}\n")

    def load(self, path):
        text = pathlib.Path(f"{path}.txt").read_text()
        self.variable.assign(float(text))


class Program:
    """One worker's program."""

    def __init__(self, folder):
        self.strategy = keras_dist.MultiWorkerMirroredStrategy()
        self.resolver = self.strategy.cluster_resolver
        self.index = self.strategy.plan.cluster.index
        self.folder = folder
        self.life = int(os.environ["KERAS_DIST_RESTARTS"])

    def note(self, name, found):
        path = self.folder / f"{name}-{self.life}-{self.index}.json"
        path.write_text(json.dumps(found))

    def with_model(self):
        """Worker 1 is told to end in the third call of the first life."""
        with self.strategy.scope():
            model = compiled()
        own = self.folder / f"model-{self.index}"
        handler = PreemptionCheckpointHandler(self.resolver, model, own)
        begin = handler.total_run_calls
        self.note("begin", begin)

        def epoch(call):
            if (self.life, self.index, call) == (0, 1, 2):
                os.kill(os.getpid(), signal.SIGTERM)
            model.fit(*data(), batch_size=4, shuffle=False, verbose=0)
            return call

        results = [
            handler.run(epoch, call)
            for call in range(handler.total_run_calls, CALLS)
        ]
        self.note(
            "model",
            {
                "results": results,
                "calls": handler.total_run_calls,
                "weights": [w.tolist() for w in model.get_weights()],
                "files": sorted(p.name for p in own.rglob("*")),
            },
        )

    def with_grace(self):
        """Worker 0 is told to end, but not at once; then both go on."""
        status = None
        handler, counter, step = self.counting()
        try:
            while True:
                if self.index == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
                handler.run(step)
        except SystemExit as end:
            status = end.code
        handler.stop_watching()
        ended = [handler.total_run_calls, float(counter.variable)]
        handler, counter, step = self.counting()
        restored = [handler.total_run_calls, float(counter.variable)]
        for _ in range(3):
            handler.run(step)
        handler.stop_watching()
        later = [handler.total_run_calls, float(counter.variable)]
        self.note(
            "counter",
            {
                "status": status,
                "ended": ended,
                "restored": restored,
                "later": later,
            },
        )

    def counting(self):
        with self.strategy.scope():
            counter = Counter(self.folder, self.index)
        handler = PreemptionCheckpointHandler(
            self.resolver,
            counter,
            self.folder / "counter",
            TerminationConfig(grace_period=GRACE_PERIOD),
        )

        def step():
            self.strategy.run(lambda: counter.variable.assign_add(1.0))

        return handler, counter, step

    def with_error(self):
        """Worker 1 fails in a call; worker 0 waits for it there."""
        with self.strategy.scope():
            model = compiled()
        handler = PreemptionCheckpointHandler(
            self.resolver, model, self.folder / "never"
        )

        def fail():
            if self.index == 1:
                raise ValueError("worker 1 can't go on")

        handler.run(fail)


def main():
    program = Program(pathlib.Path(sys.argv[1]))
    program.with_model()
    program.with_grace()
    program.with_error()


if __name__ == "__main__":
    main()
