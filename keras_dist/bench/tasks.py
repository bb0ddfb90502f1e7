"""Models and data for `fit`, ours or the user's, and loops that train them."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import keras
import numpy as np

from keras_dist.bench import loops
from keras_dist.plugin.backend import list_devices
from keras_dist.tools.users_function import called
from keras_dist.tools.users_function import function_of
from keras_dist.tools.users_function import told


@dataclass(eq=False)
class Task:
    """A model, made anew for each arm, and the data that it is trained on."""

    size: loops.ModelSize
    make: Callable[[], keras.Model]
    x: Any
    y: Any
    is_known: bool = False  # all arms must have the same loss
    _repeated: tuple[int, Any] = (0, None)

    def model(self) -> keras.Model:
        """Returns a new model, with the same weights each time."""
        keras.utils.set_random_seed(0)
        return self.make()

    def data(self, steps: int) -> tuple[Any, Any]:
        """Returns `x` and `y` of `steps` global batches; rows may repeat."""
        if self._repeated[0] != steps:
            rows = steps * self.size.rows
            repeated = keras.tree.map_structure(
                lambda each: np.resize(each, (rows, *each.shape[1:])),
                (self.x, self.y),
            )
            self._repeated = steps, repeated
        x, y = self._repeated[1]
        return x, y

    def batches(self, steps: int) -> list[tuple[Any, Any]]:
        """Returns `x` and `y` of `data`, batch by batch."""
        rows = self.size.rows
        return [
            keras.tree.map_structure(
                lambda each, start=start: each[start : start + rows],
                self.data(steps),
            )
            for start in range(0, steps * rows, rows)
        ]


def task_of(size: loops.ModelSize) -> Task:
    """Returns the task of one of our models, with other commands' batches."""
    setting = loops.Setting(size, ("cpu:0",))
    x, y = (
        np.concatenate(each) for each in zip(*setting.batches(), strict=True)
    )
    return Task(size, setting.compiled, x, y, is_known=True)


def users_task(spec: str, rows: int) -> Task:
    """Returns the task of the user's model and data."""
    function = function_of(spec)
    keras.utils.set_random_seed(0)
    given = called(spec, function)
    _check(spec, given)
    model, x, y = given
    lengths = {len(each) for each in keras.tree.flatten((x, y))}
    if len(lengths) > 1 or min(lengths) < rows:
        raise ValueError(
            f"--model {spec}: all arrays must have the same number of rows, "
            f"and at least --batch-size. Received: {sorted(lengths)} rows. "
            f"Expected: at least {rows}."
        )
    task = Task(
        loops.ModelSize(spec, rows, ()), lambda: called(spec, function)[0], x, y
    )
    # A model that no arm uses is trained, so that its errors are the user's.
    ((x, y),) = task.batches(1)
    try:
        model.fit(x, y, batch_size=rows, verbose=0)
    except Exception as error:
        raise ValueError(
            f"--model {spec}: plain Keras can't train the model on its data. "
            f"`model.fit` with one batch of {rows} rows of `x` and `y` failed "
            f"with {told(error)}"
        ) from error
    return task


def _check(spec: str, given: Any) -> None:
    if not isinstance(given, tuple) or len(given) != 3:
        raise ValueError(
            f"--model {spec}: the function returns the wrong thing. Received: "
            f"{type(given).__name__}. Expected: a tuple (model, x, y)."
        )
    model, x, y = given
    if not isinstance(model, keras.Model) or not model.compiled:
        raise ValueError(
            f"--model {spec}: the first value that the function returns must "
            f"be a compiled `keras.Model`. Received: {model!r}. Call "
            "`model.compile` in the function."
        )
    for name, nest in (("x", x), ("y", y)):
        leaves = keras.tree.flatten(nest)
        if not leaves or not all(isinstance(a, np.ndarray) for a in leaves):
            kinds = sorted({type(leaf).__name__ for leaf in leaves})
            raise ValueError(
                f"--model {spec}: `{name}` must be a NumPy array, or lists, "
                "tuples or dicts of them. Received: "
                f"{', '.join(kinds) or 'nothing'}."
            )
        if not all(leaf.ndim for leaf in leaves):
            raise ValueError(
                f"--model {spec}: an array of `{name}` has no rows. Received: "
                f"{[leaf.shape for leaf in leaves]}. Expected: rows in the "
                "first dimension."
            )


class ModelLoop(loops.StepLoop):
    """A loop around a compiled Keras model."""

    def __init__(
        self, model: keras.Model, step: Callable[..., Any] | None = None
    ) -> None:
        self.model = model
        code = getattr(step or type(model).train_step, "__code__", None)
        self.step_code: frozenset[CodeType] = frozenset({code} if code else ())


class FitLoop(ModelLoop):
    """A loop that calls `fit` for one epoch, on NumPy arrays."""

    def __init__(
        self,
        task: Task,
        built_in: loops.Scope = contextlib.nullcontext,
        runs_in: loops.Scope = contextlib.nullcontext,
    ) -> None:
        with built_in():
            super().__init__(task.model())
        self._task = task
        self.runs_in = runs_in

    def run(self, steps: int) -> float:
        """Trains; returns the mean loss over all steps, as `fit` reports it."""
        x, y = self._task.data(steps)
        with self.runs_in():
            history = self.model.fit(
                x,
                y,
                batch_size=self._task.size.rows,
                shuffle=False,
                verbose=0,
            )
        return float(history.history["loss"][-1])


def on_device(name: str) -> AbstractContextManager[Any]:
    """Returns a context manager that places a plain Keras model on a device."""
    if name == list_devices()[0]:
        return contextlib.nullcontext()
    scope: AbstractContextManager[Any] = keras.device(name)
    return scope
