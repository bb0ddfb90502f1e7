"""`fit` of a user's model under a strategy, beside plain Keras."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextlib import nullcontext
from dataclasses import dataclass
from types import CodeType
from typing import Any
from typing import TextIO

import keras
import numpy as np

from keras_dist.bench import measure
from keras_dist.core.device import default_devices
from keras_dist.errors import DeviceError
from keras_dist.planning.estimates import ALL_SPLIT
from keras_dist.planning.estimates import SLOTS_SPLIT
from keras_dist.planning.estimates import bytes_sent
from keras_dist.planning.report import Choice
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.backend import list_devices
from keras_dist.plugin.backend import set_virtual_devices
from keras_dist.plugin.replica import Replica
from keras_dist.strategies.central_storage import CentralStorageStrategy
from keras_dist.strategies.mirrored import MirroredStrategy
from keras_dist.strategies.one_device import OneDeviceStrategy
from keras_dist.strategies.strategy import Strategy
from keras_dist.tools import counting
from keras_dist.tools.users_function import called
from keras_dist.tools.users_function import error_line
from keras_dist.tools.users_function import function_of

# The model that is measured unless the user names another one, and its name.
_OWN_MODEL = "keras_dist.cli.jobs.digits:make_with_arrays", "digits"
# The arm of plain Keras.
BASE = "Keras"
# How long a block of steps takes, about.
SECONDS = 0.5
_VIRTUAL_DEVICES = 2
# What `MirroredStrategy` takes for state that is not in parts, or is.
_STATE = ("mirrored", "sharded")

Scope = Callable[[], AbstractContextManager[Any]]


@dataclass(eq=False)
class Task:
    """A model, made anew for each arm, and the data that it is trained on."""

    name: str
    rows: int  # of a global batch
    make: Callable[[], keras.Model]
    x: Any
    y: Any
    _repeated: tuple[int, Any] = (0, None)

    def model(self) -> keras.Model:
        """Returns a new model, with the same weights each time."""
        keras.utils.set_random_seed(0)
        return self.make()

    def data(self, steps: int) -> Any:
        """Returns `x` and `y` of `steps` global batches; rows may repeat."""
        rows = steps * self.rows
        if self._repeated[0] < steps:
            self._repeated = (
                steps,
                keras.tree.map_structure(
                    lambda array: np.resize(array, (rows, *array.shape[1:])),
                    (self.x, self.y),
                ),
            )
        return keras.tree.map_structure(
            lambda array: array[:rows], self._repeated[1]
        )


def users_task(spec: str, rows: int) -> Task:
    """Returns the task of the user's model and data."""
    function = function_of(spec)
    keras.utils.set_random_seed(0)
    model, x, y = _checked(spec, called(spec, function))
    lengths = {len(array) for array in keras.tree.flatten((x, y))}
    if len(lengths) > 1 or min(lengths) < rows:
        raise ValueError(
            f"--model {spec}: all arrays must have the same number of rows, "
            f"and at least --batch-size. Received: {sorted(lengths)} rows. "
            f"Expected: at least {rows}."
        )
    task = Task(spec, rows, lambda: called(spec, function)[0], x, y)
    # A model that no arm uses is trained, so that its errors are the user's.
    x, y = task.data(1)
    try:
        model.fit(x, y, batch_size=rows, verbose=0)
    except Exception as error:
        raise ValueError(
            f"--model {spec}: plain Keras can't train the model on its data. "
            f"`model.fit` with one batch of {rows} rows of `x` and `y` failed "
            f"with {error_line(error)}"
        ) from error
    return task


def _checked(spec: str, given: object) -> tuple[keras.Model, Any, Any]:
    """Returns the model and the data, if they can be used."""
    if not isinstance(given, tuple) or len(given) != 3:
        raise ValueError(
            f"--model {spec}: the function returns the wrong thing. Received: "
            f"{type(given).__name__}. Expected: a tuple (model, x, y)."
        )
    if not isinstance(given[0], keras.Model) or not given[0].compiled:
        raise ValueError(
            f"--model {spec}: the first value that the function returns must "
            f"be a compiled `keras.Model`. Received: {given[0]!r}. Call "
            "`model.compile` in the function."
        )
    for leaf in keras.tree.flatten(given[1:]) or [None]:
        if not isinstance(leaf, np.ndarray) or not leaf.ndim:
            raise ValueError(
                f"--model {spec}: `x` and `y` must be NumPy arrays with rows, "
                "or lists, tuples or dicts of such arrays. Received: "
                f"{type(leaf).__name__} of shape {np.shape(leaf)}."
            )
    return given


class FitArm:
    """An arm that calls `fit` for one epoch, on NumPy arrays."""

    def __init__(
        self, task: Task, built_in: Scope, runs_in: Scope = nullcontext
    ) -> None:
        self._task = task
        self._runs_in = runs_in
        with built_in():
            self.model = task.model()

    def __call__(self, steps: int) -> float:
        """Trains; returns the mean loss over all steps, as `fit` reports it."""
        x, y = self._task.data(steps)
        with self._runs_in():
            history = self.model.fit(
                x, y, batch_size=self._task.rows, shuffle=False, verbose=0
            )
        return float(history.history["loss"][-1])


def on_device(name: str) -> AbstractContextManager[Any]:
    """Returns a context manager that places a plain Keras model on a device."""
    if name == list_devices()[0]:
        return nullcontext()
    scope: AbstractContextManager[Any] = keras.device(name)
    return scope


def make_strategy(choice: Choice) -> Strategy:
    """Returns the strategy of a command's options, on this machine."""
    choice.check(None)
    # Of no effect where there are accelerators.
    set_virtual_devices(choice.devices or _VIRTUAL_DEVICES)
    present = default_devices(get_backend().list_devices())
    if len(present) < (choice.devices or 1):
        raise DeviceError(
            f"--devices {choice.devices}: there are fewer devices.\nReceived: "
            f"{', '.join(map(str, present))}. Expected: at most "
            f"{len(present)}. To compute on virtual CPU devices, hide the "
            "accelerators from the framework."
        )
    devices = [str(device) for device in present[: choice.devices]]
    if choice.strategy == "one-device":
        return OneDeviceStrategy(devices[0])
    if choice.strategy == "central":
        return CentralStorageStrategy(devices)
    return MirroredStrategy(
        devices,
        optimizer_state=_STATE[choice.split == SLOTS_SPLIT],
        variables=_STATE[choice.split == ALL_SPLIT],
    )


def run(
    model: str, batch_size: int, choice: Choice, rounds: int, stderr: TextIO
) -> measure.Measurement:
    """Measures a user's model under the strategy of a command's options."""
    strategy = make_strategy(choice)
    own_model, own_name = _OWN_MODEL
    task = users_task(model or own_model, batch_size)
    task.name = model or own_name
    with measure.progress(task.name, rounds, stderr) as on_round:
        return measure_fit(
            task, strategy, choice.strategy, rounds, SECONDS, on_round
        )


def measure_fit(
    task: Task,
    strategy: Strategy,
    name: str,
    rounds: int,
    seconds: float,
    on_round: Callable[[], None],
    others: Mapping[str, Callable[[], measure.Arm]] | None = None,
) -> measure.Measurement:
    """Measures all arms in blocks that alternate.

    `name` is that of the strategy's arm, and `others` makes further ones.
    """
    devices = [str(device) for device in strategy.plan.devices]

    def placed() -> AbstractContextManager[Any]:
        return on_device(devices[0])

    # Neighbors are measured one after the other.
    arms: dict[str, measure.Arm] = {
        BASE: FitArm(task, placed, placed),
        name: FitArm(task, strategy.scope),
        measure.AGAIN: FitArm(task, placed, placed),
        **{other: make() for other, make in (others or {}).items()},
    }
    losses = {}
    for arm_name, arm in arms.items():
        arm(measure.FEW)
        losses[arm_name] = arm(1)
    counts = _counts(arms, name, strategy)
    steps = measure.steps_that_take(arms[BASE], seconds)
    # The data that all arms share is made before the first one is timed.
    task.data(steps)
    return measure.Measurement(
        model=task.name,
        devices=devices,
        rows=task.rows,
        steps=steps,
        times=measure.time_arms(arms, steps, rounds, on_round),
        losses=losses,
        counts=counts,
        pairs=[(name, arm_name) for arm_name in {BASE: None, **(others or {})}],
        base=BASE,
    )


def _counts(
    arms: Mapping[str, measure.Arm], name: str, strategy: Strategy
) -> dict[str, dict[str, float | None]]:
    """Counts calls, collectives and bytes of a step, where it is cheap."""
    calls: dict[str, float | None] = {}
    met: dict[str, float | None] = {}
    for arm_name in [
        arm_name for arm_name in arms if arm_name != measure.AGAIN
    ]:
        calls[arm_name], met[arm_name] = measure.calls_a_step(
            arms[arm_name], _rendezvous()
        )
    ours = arms[name]
    assert isinstance(ours, FitArm)
    placement = counting.placement_of(strategy.plan)
    load, kept = counting.load_of(ours.model), counting.kept_of(ours.model)
    # Compiled steps do not tell how often replicas wait for each other.
    is_unknown = strategy.num_replicas_in_sync > 1 and not met[name]
    return {
        "calls": calls,
        "collectives": {BASE: 0, name: None if is_unknown else met[name]},
        "planned_bytes": {BASE: 0, name: bytes_sent(load, placement, kept)},
    }


def _rendezvous() -> Iterator[CodeType]:
    """Yields the codes of all backends' `Replica.rendezvous`."""
    classes = [Replica]
    while classes:
        one = classes.pop()
        classes += one.__subclasses__()
        yield one.rendezvous.__code__
