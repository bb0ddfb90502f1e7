"""The models, the devices and the loops that are measured."""

import contextlib
import dataclasses
import functools
import itertools
import time

import keras
import numpy as np

import keras_dist
from keras_dist.bench import measure
from keras_dist.bench import report
from keras_dist.bench.fit import Task
from keras_dist.bench.measure import Measurement

LEARNING_RATE = 1e-3
# The default of Keras' Adam, for optimizers that have another one.
EPSILON = 1e-7

NUM_BATCHES = 4
# Steps that warm an arm up, and steps in which calls are counted.
COUNTED_STEPS = 20
# Steps in a call of `scan_steps`.
SCANNED_STEPS = 10

# Rows of a global batch; features, hidden units and classes.
MODELS = {
    "small": (64, (64, 32, 10)),
    "narrow": (128, (256, 512, 512, 10)),
    "medium": (256, (256, 1024, 1024, 10)),
    "large": (64, (1024, 4096, 4096, 2048, 10)),  # 29 million parameters
    # Rows take long to load: of `bench workers`.
    "input": (32, (64, 32, 10)),
}
# Columns for what only some commands count.
COLUMNS = report.COLUMNS | {
    "bytes_sent": ("Sent, kB", 1e3, 1),
    "least_bytes": ("Least, kB", 1e3, 1),
}
# Arms that `pairs_of` knows by name.
_KNOWN = {
    "native",
    "ours",
    measure.AGAIN,
    "scan",
    "ragged",
    "reduced",
    "fused",
    "fit, compiled",
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A multilayer perceptron on devices, one of each replica.

    Every arm starts with its weights and batches.
    """

    name: str
    devices: tuple[str, ...]

    @property
    def rows(self):
        return MODELS[self.name][0]

    @property
    def widths(self):
        return MODELS[self.name][1]

    @property
    def num_replicas(self):
        return len(self.devices)

    @property
    def title(self):
        """The model's name and the number of replicas."""
        return f"{self.name}, N={self.num_replicas}"

    def weights(self):
        """Returns kernels of shape `(inputs, units)` and biases, in turns."""
        rng = np.random.default_rng(0)
        weights = []
        for inputs, units in itertools.pairwise(self.widths):
            kernel = rng.normal(0.0, inputs**-0.5, (inputs, units))
            weights += [kernel.astype("float32"), np.zeros(units, "float32")]
        return weights

    def batches(self, rows=None):
        """Returns batches of float32 features and int32 classes."""
        # All have the same features and different classes, so that no model
        # can fit them: gradients that fade into denormal numbers would make
        # late steps slower than early ones.
        rng = np.random.default_rng(1)
        features, *_, classes = self.widths
        x = rng.normal(size=(self.rows, features)).astype("float32")
        labels = rng.integers(0, classes, (NUM_BATCHES, self.rows), "int32")
        return [(x[:rows], y[:rows]) for y in labels]

    def rows_of(self, worker):
        """Returns a worker's rows of all batches; a worker is one replica."""
        each = self.rows // self.num_replicas
        rows = slice(worker * each, (worker + 1) * each)
        return [(x[rows], y[rows]) for x, y in self.batches()]

    def model(self):
        """Returns a new Keras model with the setting's weights."""
        features, *hidden, classes = self.widths
        model = keras.Sequential(
            [
                keras.Input((features,)),
                *(keras.layers.Dense(n, "relu") for n in hidden),
                keras.layers.Dense(classes),
            ]
        )
        model.set_weights(self.weights())
        return model

    def model_and_optimizer(self):
        """Returns a new model and its optimizer, both built."""
        model = self.model()
        optimizer = keras.optimizers.Adam(LEARNING_RATE)
        optimizer.build(model.trainable_variables)
        return model, optimizer

    def compiled(self, **options):
        model = self.model()
        model.compile(
            keras.optimizers.Adam(LEARNING_RATE),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            **options,
        )
        return model

    def task(self, **options):
        """Returns the model and all batches, for `fit`."""
        x, y = map(np.concatenate, zip(*self.batches(), strict=True))
        make = functools.partial(self.compiled, **options)
        return Task(self.name, self.rows, make, x, y)


def row_losses(y, logits):
    return keras.losses.sparse_categorical_crossentropy(
        y, logits, from_logits=True
    )


def settings_of(models, groups):
    """Returns all models on all groups of devices, which share rows evenly."""
    settings = [Setting(name, devices) for name in models for devices in groups]
    for setting in settings:
        if setting.rows % setting.num_replicas:
            raise SystemExit(
                f"{setting.title}: {setting.rows} rows have no equal shares."
            )
    return settings


def on_replicas(options):
    """Returns the settings of a command's --models and --replicas."""
    most = max(options.replicas)
    if options.device == "cpu":
        keras_dist.set_virtual_devices(most)
    present = keras_dist.list_devices(options.device)
    if len(present) < most:
        raise SystemExit(f"{most} replicas need as many of {present}.")
    groups = [tuple(present[:count]) for count in options.replicas]
    return settings_of(options.models, groups)


def published(command, measured, native, *notes, **more):
    """Shows measurements, and returns them for JSON."""
    head = report.header(f"bench {command}")
    notes = f"Native: {native}", *notes
    report.report_of(head, measured, *notes, columns=COLUMNS).show()
    settings = [report.as_json(each) for each in measured]
    return head | {"native": native, "settings": settings} | more


def batches_of(task, steps):
    """Returns `x` and `y` of `steps` batches of a task."""
    x, y = task.data(steps)
    starts = range(0, steps * task.rows, task.rows)
    return [(x[i : i + task.rows], y[i : i + task.rows]) for i in starts]


class StepLoop:
    """An arm that calls `step` with the parts of each batch."""

    runs_in = contextlib.nullcontext

    def __init__(
        self, step, batches=(), place=None, runs_in=contextlib.nullcontext
    ):
        self.step = step
        self.batches = batches
        self.runs_in = runs_in
        self._place = place

    def feed(self, steps):
        batches = itertools.islice(itertools.cycle(self.batches), steps)
        return batches if self._place is None else map(self._place, batches)

    def __call__(self, steps):
        """Trains from the first batch on, waits, and returns the last loss."""
        step, loss = self.step, None
        with self.runs_in():
            for batch in self.feed(steps):
                loss = step(*batch)
        return float(keras.ops.convert_to_numpy(loss))


class BatchLoop(StepLoop):
    """A loop of `train_on_batch`, which is the step of `fit`."""

    def __init__(
        self,
        setting,
        batches,
        built_in=contextlib.nullcontext,
        runs_in=contextlib.nullcontext,
    ):
        with built_in():
            self._model = model = setting.compiled()
        # A strategy's `train_on_batch` does not keep its model alive.
        super().__init__(
            lambda *batch: model.train_on_batch(*batch),
            batches,
            runs_in=runs_in,
        )

    def feed(self, steps):
        for index, batch in enumerate(super().feed(steps), 1):
            if index == steps:
                # Else Keras 3.14 returns the mean loss of all calls.
                self._model.reset_metrics()
            yield batch


def measurement(setting, steps, times, losses, counts):
    """Returns the measurement of arms beside a native loop."""
    return Measurement(
        model=setting.name,
        devices=setting.devices,
        rows=setting.rows,
        steps=steps,
        times=times,
        losses=losses,
        counts=counts,
        pairs=pairs_of(times),
        base="native",
    )


def pairs_of(arms):
    """Returns the pairs of arms to compare with a native loop, ours first."""
    pairs = [
        ("ours", "native"),
        ("reduced", "native"),
        ("ragged", "ours"),
        ("scan", "ours"),
        ("fit, compiled", "fused"),
        ("fit, compiled", "fit"),
    ]
    for arm in arms:
        if arm not in _KNOWN:
            pairs += [(arm, "native"), ("ours", arm)]
    return [pair for pair in pairs if {*pair} <= {*arms}]


def check_losses(measured, *others):
    """Refuses a measurement whose arms computed different things."""
    far = {k: v for k, v in measured.far_losses().items() if k not in others}
    if far:
        raise SystemExit(
            f"{measured.model}: losses differ from that of '{measured.base}', "
            f"{measured.losses[measured.base]}: {far}."
        )


def steps_in(arm, seconds):
    """Returns how many steps take `seconds`: a multiple of `SCANNED_STEPS`."""
    seen = []
    for _ in range(3):
        start = time.perf_counter()
        arm(COUNTED_STEPS)
        seen.append((time.perf_counter() - start) / COUNTED_STEPS)
    one = sorted(seen)[1]
    return SCANNED_STEPS * max(1, round(seconds / one / SCANNED_STEPS))
