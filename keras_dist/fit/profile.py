"""`strategy.profile`: traces of a few training steps, or of any code."""

import contextlib
import os
import warnings
from typing import Any

import keras

from keras_dist.errors import StrategyMismatchError
from keras_dist.errors import UnsupportedBackendError
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.front_end import bound
from keras_dist.plugin.profiler import Profiler
from keras_dist.replica.strategy_core import StrategyBase

_STEPS = (10, 20)
# The one that records this process.
_running: list["StepProfile"] = []


class StepProfile(
    keras.callbacks.Callback, contextlib.AbstractContextManager["StepProfile"]
):
    """A profile that `strategy.profile` describes: a callback, or a context."""

    def __init__(
        self,
        strategy: StrategyBase,
        directory: str | os.PathLike[str],
        steps: tuple[int, int] | None,
    ) -> None:
        super().__init__()
        self._profiler = _profiler()
        self._strategy = strategy
        self._directory = _checked_directory(directory)
        self._has_steps = steps is not None
        self._first, self._end = _checked_steps(steps)
        self._next_step = self._first_of_execution = 0
        self._has_recorded = False
        self._step: contextlib.AbstractContextManager[object] | None = None

    @property
    def directory(self) -> str:
        """The folder of this worker's traces."""
        cluster = self._strategy.plan.cluster
        index = 0 if cluster is None else cluster.index
        return os.path.join(self._directory, f"worker-{index}")

    def __enter__(self) -> "StepProfile":
        if self._has_steps:
            raise ValueError(
                "`with strategy.profile(...)` records all of its body, and "
                f"`steps` are those of `fit`. Received: steps="
                f"({self._first}, {self._end}). Expected: no `steps`, or the "
                "profile in the `callbacks` of `fit`."
            )
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        binding = bound(model)
        if getattr(binding, "strategy", None) is not self._strategy:
            owner = "no strategy" if binding is None else binding.strategy
            raise StrategyMismatchError(
                "`strategy.profile` records models of its own strategy.\n"
                f"Received: model '{model.name}' of {owner!s} in `fit`, and "
                f"a profile of {self._strategy!r}. Call `profile` of the "
                "model's strategy. Make the model in `strategy.scope()`, or "
                "use `with strategy.profile(...):` around `fit`."
            )

    def on_train_begin(self, logs: object = None) -> None:
        self._next_step, self._has_recorded = 0, False

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        # A compiled call may have several steps.
        end = self._next_step + self.model.steps_per_execution
        if end > self._first and not self._has_recorded:
            self._start()
        self._first_of_execution = batch
        if self in _running:
            self._step = self._profiler.step(self._next_step)
            self._step.__enter__()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._end_step()
        self._next_step += batch - self._first_of_execution + 1
        if self in _running and self._next_step >= self._end:
            self.stop()

    def on_train_end(self, logs: object = None) -> None:
        self.stop()
        if not self._has_recorded:
            warnings.warn(
                "Nothing was profiled: `fit` ended before the first step of "
                f"the profile. Received: steps=({self._first}, {self._end}), "
                f"and a `fit` of {self._next_step} steps. Expected: `steps` "
                "that begin earlier, or more epochs or data.",
                stacklevel=2,
            )

    def is_callback_of(self, model: keras.Model) -> bool:
        """Returns whether `fit` of a model runs this profile."""
        return self._model is model

    def stop(self) -> None:
        """Ends a recording that is under way, and writes it."""
        if self not in _running:
            return
        self._end_step()
        try:
            self._profiler.stop()
        finally:
            _running.remove(self)

    def _start(self) -> None:
        if _running:
            raise RuntimeError(
                "A process records one profile at a time.\nReceived: "
                f"strategy.profile({self._directory!r}), while "
                f"strategy.profile({_running[0]._directory!r}) records. "
                "Expected: one profile after the other. Use one profile only, "
                "or `steps` that don't overlap."
            )
        try:
            self._profiler.start(self.directory)
        except Exception as error:
            raise RuntimeError(
                f"The profiler of '{keras.backend.backend()}' did not start: "
                f"{error}. Received: strategy.profile({self._directory!r}). "
                "Expected: a directory that can be written, and no other "
                "profiler that runs, such as that of `TensorBoard`'s "
                "`profile_batch`."
            ) from error
        self._has_recorded = True
        _running.append(self)

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)


def stop_profiles_of(model: keras.Model) -> None:
    """Ends the profiles that `fit` of a model has begun, also if it fails."""
    for profile in _running.copy():
        if profile.is_callback_of(model):
            profile.stop()


def _profiler() -> Profiler:
    profiler = get_backend().profiler()
    if profiler is None:
        raise UnsupportedBackendError(
            f"The backend '{keras.backend.backend()}' has no profiler. "
            "Received: `strategy.profile`. Expected: a backend with one "
            "('jax', 'tensorflow' or 'torch'), chosen with KERAS_BACKEND."
        )
    return profiler


def _checked_directory(directory: str | os.PathLike[str]) -> str:
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(
            "`directory` is the path of a folder for traces. Received: "
            f"{directory!r} of type {type(directory).__name__}. Expected: a "
            "string or a `pathlib.Path`."
        )
    path = os.fspath(directory)
    if os.path.exists(path) and not os.path.isdir(path):
        raise NotADirectoryError(
            "`directory` is the path of a folder for traces. Received: "
            f"{path!r}, which is a file. Expected: a folder, or a new path."
        )
    return path


def _checked_steps(steps: Any) -> tuple[int, int]:
    if steps is None:
        return _STEPS
    is_pair = isinstance(steps, (tuple, list)) and len(steps) == 2
    if (
        not is_pair
        or not all(type(step) is int for step in steps)
        or not 0 <= steps[0] < steps[1]
    ):
        raise ValueError(
            "`steps` are the first step of the profile and the first one "
            f"after it, counted from 0. Received: {steps!r}. Expected: two "
            "integers that increase, such as (10, 20)."
        )
    return steps[0], steps[1]
