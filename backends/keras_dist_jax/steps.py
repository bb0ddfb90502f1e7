"""A model's three steps, as the functions that Keras' trainer calls."""

from typing import Any

import jax
import jax.numpy as jnp

from keras_dist_jax.gate import OpenGate
from keras_dist_jax.layout import BatchRouter
from keras_dist_jax.layout import StepFn
from keras_dist_jax.running import Running


class FitStep:
    """One step of a model, on the state that `Running` keeps.

    Args:
        running: The model's `Running`.
        keep: The step's program that leaves the given state alive.
        donate: The program that deletes the given state, or `None`.
        eager: Boolean, whether the programs run operation by operation.
    """

    def __init__(
        self,
        running: Running,
        keep: BatchRouter,
        donate: BatchRouter | None = None,
        eager: bool = False,
    ) -> None:
        self._running = running
        self._keep = keep
        self._donate = donate
        self._gate = OpenGate() if eager else running.gate
        # Eager operations run on this worker's devices only.
        self._is_local = eager and running.layout.is_wide

    def __call__(self, state: Any, data: Any) -> tuple[Any, Any]:
        """Runs one step, as Keras' trainer calls it.

        `state` comes from `Running.begin` or the step before; `data` is the
        global batch.

        Returns:
            Tuple of the step's outputs and of the stand-in for the new state.
        """
        running = self._running
        if state is not running.token:
            raise ValueError(
                "The state does not come from this model's trainer. Received: "
                f"{type(state).__name__}. Call `fit`, `evaluate` or "
                "`predict`, or compile `train_step` yourself."
            )
        running.stepping = True
        try:
            donating = running.donating and self._donate is not None
            outputs = self._run(data, donating)
        except BaseException:
            running.suspect = True
            raise
        finally:
            running.stepping = False
        return outputs, state

    def _run(self, data: Any, donating: bool) -> Any:
        program = self._donate if donating else self._keep
        assert program is not None
        call, data, rows = program.route(data)
        running, gate = self._running, self._gate
        last = running.last
        with gate.lock:
            gate.settle(running)
            if running.failures.errors:
                running.raise_failure()
            values = last[-1][1]
            if donating:
                # `extend` runs in C, so that no interrupt comes after a step
                # has deleted its inputs and before its results are kept.
                last.extend(map(call, (values,), (data,), (rows,)))
                outputs = last[-1][0]
                gate.enter(running, any_of(last[-1]))
            else:
                layout, given = running.layout, values
                if self._is_local:
                    given = [list(map(layout.narrow, g)) for g in values]
                outputs, changes = call(given, data, rows)
                gate.enter(running, any_of((outputs, changes)))
                for group, changed in zip(values, changes, strict=True):
                    for index, value in changed.items():
                        if self._is_local:
                            value = layout.widen(layout.place(value))
                        group[index] = value
        if running.layout.is_wide:
            outputs = jax.tree.map(running.layout.result, outputs)
        return outputs


def any_of(results: Any) -> Any:
    """Returns one array of a program's results, or `None` without any."""
    leaves = jax.tree.leaves(results)
    return leaves[0] if leaves else None


def all_values(step: StepFn) -> StepFn:
    """Makes a step return a new value for each variable."""

    def run(values: Any, data: Any) -> tuple[Any, Any]:
        outputs, new = step(_as_keras(values), data)
        new = _groups_like(new, values)
        return outputs, [
            [_like(n, o) for n, o in zip(group, old, strict=True)]
            for group, old in zip(new, values, strict=True)
        ]

    run.__name__ = step.__name__  # profiles show it
    return run


def changed_values(step: StepFn) -> StepFn:
    """Makes a step return new values only for the variables that it changed.

    Values that are merely passed through need no second buffer.
    """

    def run(values: Any, data: Any) -> tuple[Any, Any]:
        outputs, new = step(_as_keras(values), data)
        new = _groups_like(new, values)
        return outputs, [
            {
                index: _like(n, o)
                for index, (n, o) in enumerate(zip(group, old, strict=True))
                if n is not o
            }
            for group, old in zip(new, values, strict=True)
        ]

    run.__name__ = step.__name__
    return run


def _as_keras(values: Any) -> tuple[list[Any], ...]:
    return tuple(list(group) for group in values)


def _groups_like(new: Any, old: Any) -> list[list[Any]]:
    """Checks a new state's lengths, and converts its groups to lists."""
    groups = [list(group) for group in new]
    got, expected = [len(g) for g in groups], [len(g) for g in old]
    if got != expected:
        raise ValueError(
            "A step returned a state of another length than it was given. "
            f"Received: groups of {got} values. Expected: {expected}. Return "
            "a value for each variable, changed or not."
        )
    return groups


def _like(new: Any, old: Any) -> Any:
    """Casts `new` to the dtype of `old`, to avoid a second compilation."""
    if jnp.shape(new) != old.shape:
        raise ValueError(
            "A step returned a value of another shape than its variable. "
            f"Received: {jnp.shape(new)}. Expected: {old.shape}."
        )
    weak = getattr(new, "weak_type", True)
    if not weak and new.dtype == old.dtype:
        return new
    return jax.lax.convert_element_type(jnp.asarray(new), old.dtype)
