"""Trains a case with plain Keras and under a strategy, and compares.

`PARITY_PLAIN=1` leaves the strategy out: plain Keras is compared with itself,
which shows whether a case is sound before the product is blamed.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

import keras_dist

BACKEND = keras.backend.backend()
BACKENDS = ("jax", "tensorflow", "torch")
PLAIN_ONLY = os.environ.get("PARITY_PLAIN") == "1"
# Compiling with XLA or inductor costs more than the tests; cases ask for it.
JIT = {"jax": "auto"}.get(BACKEND, False)
# Of 7 rows, two, three and four replicas have unequal shares.
FIT = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}


def devices(num_replicas):
    """The names of that many virtual CPU devices."""
    return [f"cpu:{index}" for index in range(num_replicas)]


def strategy(num_replicas):
    """A `MirroredStrategy` on that many virtual CPU devices."""
    return keras_dist.MirroredStrategy(devices(num_replicas))


def central(num_replicas):
    """A `CentralStorageStrategy` whose variables are on a device apart."""
    return keras_dist.CentralStorageStrategy(devices(num_replicas), "cpu:3")


def sharded(num_replicas):
    """A `MirroredStrategy` that shards the optimizer's state."""
    return keras_dist.MirroredStrategy(
        devices(num_replicas), optimizer_state="sharded"
    )


def sharded_variables(num_replicas):
    """A `MirroredStrategy` that shards all variables."""
    return keras_dist.MirroredStrategy(
        devices(num_replicas), variables="sharded"
    )


def scope(num_replicas, make=None):
    """The scope of a strategy; of nothing, with `None`, for plain Keras."""
    if num_replicas is None or PLAIN_ONLY:
        return contextlib.nullcontext()
    return (make or strategy)(num_replicas).scope()


def distribute(model, num_replicas):
    """Adopts a model; leaves it alone, with `None`, for plain Keras."""
    if num_replicas is None or PLAIN_ONLY:
        return model
    return strategy(num_replicas).distribute(model)


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of the parity table.

    Args:
        name: String, the id of the test.
        build: Callable that returns an uncompiled model.
        data: Callable from a number of rows to `x`, `y`, `sample_weight`, ...
        compile: Callable that returns the arguments of `compile`.
        rows: Integer, size of the data.
        batch_size: Integer. The default, 7, gives unequal shares on 2, 3 and
            4 replicas; with the default `rows` there is one shape to compile.
        fit: Further arguments of `fit`.
        replicas: Numbers of replicas to run with.
        full: Whether to compare validation, `evaluate` and `predict` too.
        rtol: Largest difference, relative to an array's largest entry.
        backends: Backends where plain Keras can do this.
        dtype_policy: String, the global policy while the model is built.
    """

    name: str
    build: Callable[[], keras.Model]
    data: Callable[[int], Mapping[str, Any]]
    compile: Callable[[], Mapping[str, Any]]
    rows: int = 21
    batch_size: int = 7
    fit: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replicas: tuple[int, ...] = (2,)
    full: bool = False
    rtol: float = 2e-5
    backends: tuple[str, ...] = BACKENDS
    dtype_policy: str = "float32"

    def __repr__(self):
        return self.name


@contextlib.contextmanager
def dtype_policy(name):
    """The global dtype policy, put back at the end."""
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(previous)


def set_initial_weights(model, seed=3):
    """Fills a built model's weights from NumPy, alike on every backend."""
    rng = np.random.default_rng(seed)
    model.set_weights(
        [
            rng.normal(0.0, 0.4, w.shape).astype(w.dtype)
            if len(w.shape) > 1
            else to_numpy(w).astype(w.dtype)
            + rng.uniform(0.0, 0.2, w.shape).astype(w.dtype)
            for w in model.weights
        ]
    )
    return model


def to_numpy(value):
    """A variable, tensor or number as a float64 array."""
    if isinstance(value, keras.Variable):
        value = value.value
    return np.asarray(keras.ops.convert_to_numpy(value)).astype(np.float64)


def state_of(model):
    """A model's and its optimizer's variables as a dict of arrays."""
    state = {
        f"weights/{index}": to_numpy(weight)
        for index, weight in enumerate(model.weights)
    }
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        state |= {
            f"optimizer/{index}": to_numpy(variable)
            for index, variable in enumerate(optimizer.variables)
        }
    return state


def flat(prefix, structure):
    """A nested structure as a dict of arrays."""
    return {
        f"{prefix}{''.join(f'/{key}' for key in path)}": to_numpy(value)
        for path, value in keras.tree.flatten_with_path(structure)
    }


def fitted(model, *args, **kwargs):
    """What `fit` returns and leaves in a model, as a dict of arrays."""
    history = model.fit(*args, **kwargs).history
    return flat("history", history) | state_of(model)


def compile_mode(run_eagerly):
    """Arguments of `compile` for steps that run eagerly, or are traced."""
    jit_compile = False if run_eagerly else JIT
    return {"run_eagerly": run_eagerly, "jit_compile": jit_compile}


def compiled(count, build, optimizer="sgd", make=None, eager=False, **options):
    """A compiled model with initial weights from NumPy.

    Args:
        count: Integer, the number of replicas, or `None` for plain Keras.
        build: Callable that returns a built model.
        optimizer: A name, or a callable that returns an optimizer.
        make: Callable from a number of replicas to a strategy.
        eager: Whether steps run eagerly.
        **options: Further arguments of `compile`; the loss is `"mse"`.
    """
    with scope(count, make):
        model = set_initial_weights(build())
        model.compile(
            optimizer() if callable(optimizer) else optimizer,
            **{"loss": "mse", **compile_mode(eager), **options},
        )
    return model


def results(model, data, **options):
    """What `fit`, `evaluate` and `predict` return and leave in a model."""
    history = model.fit(**data, **FIT | options).history
    logs = model.evaluate(**data, batch_size=7, verbose=0, return_dict=True)
    predictions = model.predict(data["x"], batch_size=7, verbose=0)
    return (
        flat("history", history)
        | flat("evaluate", logs)
        | flat("predict", predictions)
        | state_of(model)
    )


def drop_iterations(*states):
    """Leaves the optimizer's count of steps out of results, on TensorFlow.

    Where it does not know how long data is, plain Keras counts the step that
    finds no more of it; the graph adds to the count before it looks.
    """
    for state in states if BACKEND == "tensorflow" else ():
        state.pop("optimizer/0")


def assert_same(actual, expected, rtol=2e-5, atol=1e-6):
    """Compares two dicts of arrays; an error names the worst entries."""
    assert not set(actual) ^ set(expected)
    wrong = []
    for name, want in expected.items():
        got = actual[name]
        if got.shape != want.shape:
            wrong.append((np.inf, f"{name}: shape {got.shape} != {want.shape}"))
            continue
        if not want.size or np.array_equal(got, want, equal_nan=True):
            continue
        with np.errstate(invalid="ignore"):
            worst = np.max(np.abs(got - want))
            largest = np.max(np.abs(want))
        if not worst <= atol + rtol * largest:
            wrong.append(
                (
                    worst,
                    f"{name}: off by {worst:.3g}, largest entry {largest:.3g}, "
                    f"got {got.ravel()[:4]}, want {want.ravel()[:4]}",
                )
            )
    wrong.sort(key=lambda pair: -np.nan_to_num(pair[0], nan=np.inf))
    assert not wrong, f"{len(wrong)} of {len(expected)} differ:\n" + "\n".join(
        message for _, message in wrong[:12]
    )


def train(case, num_replicas, make=None):
    """Trains a case for two epochs.

    Args:
        case: A `Case`.
        num_replicas: Integer, or `None` for plain Keras.
        make: Callable from a number of replicas to a strategy; by default,
            `strategy`.

    Returns:
        Dict of arrays: all that the training left behind.
    """
    keras.utils.set_random_seed(11)
    with dtype_policy(case.dtype_policy), scope(num_replicas, make):
        model = case.build()
        if model.built:
            set_initial_weights(model)
        model.compile(**{"jit_compile": JIT, **case.compile()})
    data = dict(case.data(case.rows))
    options = {"epochs": 2, "batch_size": case.batch_size, "shuffle": False}
    options.update(case.fit)
    if case.full:
        backwards = keras.tree.map_structure(lambda rows: rows[::-1], data)
        options["validation_data"] = tuple(backwards.values())
        options["validation_batch_size"] = case.batch_size
    history = model.fit(**data, **options, verbose=0).history
    outcome = flat("history", history) | state_of(model)
    if case.full:
        size = case.batch_size
        logs = model.evaluate(
            **data, batch_size=size, return_dict=True, verbose=0
        )
        outcome |= flat("evaluate", logs)
        predictions = model.predict(data["x"], batch_size=size, verbose=0)
        outcome |= flat("predict", predictions)
    return outcome


_plain_outcomes = {}


def plain(case):
    """What plain Keras gives; trained once, whatever `replicas` says."""
    if case.name not in _plain_outcomes:
        _plain_outcomes[case.name] = train(case, None)
    return _plain_outcomes[case.name]
