"""Storage of a model's state while its steps run, in place of variables.

If a step fails on the device, its inputs are gone, and variables get the state
at the start of the epoch, if there is a copy. After any other failure, they get
the state after the last step.
"""

import collections
import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_dist_jax import keras_internals as internals
from keras_dist_jax.fit import epoch_copy
from keras_dist_jax.machine import current_machine
from keras_dist_jax.machine import is_described
from keras_dist_jax.placement import arrays
from keras_dist_jax.placement.layout import Layout
from keras_dist_jax.placement.layout import Programs
from keras_dist_jax.placement.layout import StepFn
from keras_dist_jax.programs.callbacks import guarded
from keras_dist_jax.programs.jaxprs import edited
from keras_dist_jax.programs.jaxprs import has_callbacks
from keras_dist_jax.throttle import Throttle
from keras_dist_jax.throttle import any_of
from keras_dist_jax.variables.bindings import BindingInFit
from keras_dist_jax.variables.bindings import ShardedBinding
from keras_dist_jax.variables.bindings import binding_in_fit

Values = list[list[Any]]


class StateGroup:
    """A stand-in for one group of the state, which Keras gives to steps."""

    # It is no list: Keras would go through a list's arrays at every step.

    __slots__ = ("_index", "_running")

    def __init__(self, running: "Running", index: int) -> None:
        self._running = running
        self._index = index

    def __iter__(self) -> Iterator[Any]:
        return iter(self._running.newest()[self._index])


class Running:
    """A model's state while steps run, on loan from its variables."""

    def __init__(
        self, model: keras.Model, layout: Layout, throttle: Throttle
    ) -> None:
        self._model = weakref.ref(model)
        self.layout = layout
        self.throttle = throttle
        self.failures: list[BaseException] = []
        # What Keras passes to steps; `None` while variables have the state.
        self.token: tuple[StateGroup, ...] | None = None
        # The outputs of the last step, and the state after it.
        self.last: collections.deque[tuple[Any, Values]] = collections.deque(
            maxlen=1
        )
        self.donating = False
        self.stepping = False
        self.suspect = False  # a step has raised
        self.cause: BaseException | None = None  # what it has raised
        self._variables: list[list[keras.Variable]] = []
        self._bindings: list[list[BindingInFit]] = []
        # The state after a failure; `None` if there is no copy.
        self._fallback: Values | None = []
        # The copy of this epoch, once it was asked for.
        self._epoch_start: list[Values | None] = []
        self._spoiled: BaseException | None = None

    @property
    def model(self) -> keras.Model:
        model = self._model()
        assert model is not None
        return model

    def newest(self) -> Values:
        """Returns the state after the last step, a list for each group."""
        return self.last[-1][1]

    def forget_epoch(self) -> None:
        """Makes the next step the first of an epoch."""
        self._epoch_start = []
        if self.token is None:
            self._fallback = []

    def begin(
        self, names: Sequence[str], take_away: bool, donate: bool
    ) -> tuple[StateGroup, ...]:
        """Takes the state from the variables."""
        self.sync()
        self._variables = [
            internals.variables_of(self.model, name) for name in names
        ]
        self._bindings = [
            [binding_in_fit(v, self.storage_layout(v)) for v in group]
            for group in self._variables
        ]
        values = [list(map(_taken, group)) for group in self._bindings]
        self._fallback = self._way_back(values, donate)
        self.donating, self.suspect, self._spoiled = donate, False, None
        self.cause = None
        self.last.append((None, values))
        self.token = token = tuple(
            StateGroup(self, i) for i in range(len(names))
        )
        if take_away:
            for binding in itertools.chain(*self._bindings):
                binding.take_away(
                    functools.partial(self._read, binding.variable)
                )
        if donate:
            for group in values:
                arrays.copy_shared(group)
        self.lay_out(values, names)
        return token

    def for_mesh(self, step: StepFn) -> StepFn:
        """Makes a step that notes errors of callbacks, for several devices."""
        guard = functools.partial(guarded, failures=self.failures)
        return edited(step, guard, *self.layout.edits)

    def compiled(self, step: StepFn, **options: bool) -> Programs:
        """Compiles a step, with what `Layout.compile` takes."""
        layout = self.layout
        if layout.edits:
            return layout.compile(self.for_mesh(step), **options)
        plain = layout.compile(step, **options)
        if not layout.is_mesh or current_machine() is not None:
            return plain
        guarding = layout.compile(self.for_mesh(step), **options)
        return Programs(*map(_guarded_if_needed, plain, guarding))

    def storage_layout(self, variable: keras.Variable) -> Layout:
        """Returns the layout on which a variable rests while no step runs."""
        return self.layout

    def lay_out(self, values: Values, names: Sequence[str]) -> None:
        """Moves the state, in place, to where steps take it."""
        if self.layout.is_global:
            for group in values:
                group[:] = map(self.layout.to_global, group)

    def rested(self, values: Values) -> Values:
        """Returns the state of the steps as arrays where variables rest."""
        if not self.layout.is_global:
            return values
        return [list(map(self.layout.to_local, group)) for group in values]

    def sync(self) -> None:
        """Hands the newest good state back to the variables."""
        if self.token is None:
            return
        values = self.newest()
        error = arrays.failure_of(list(itertools.chain(*values)))
        error = self._spoiled or self._failure() or error
        if error is None:
            values = self.rested(values)
        elif self._fallback is not None:
            values = self._fallback
        else:
            epoch_copy.lost(self.cause or error)
            # What was deleted can't be moved.
            with contextlib.suppress(Exception):
                values = self.rested(values)
        for group, group_values in zip(self._bindings, values, strict=True):
            for binding, value in zip(group, group_values, strict=True):
                binding.give_back(value)
        self.token = None
        self.last.clear()
        internals.mark_synced(self.model)
        if error is not None and not self.suspect:
            raise error

    def raise_failure(self) -> None:
        """Raises the error of a host callback, and gives up the state."""
        self._spoiled = self._failure()
        if self._spoiled is not None:
            raise self._spoiled

    def _failure(self) -> BaseException | None:
        """Returns the first error of a host callback, and forgets all."""
        first = next(iter(self.failures), None)
        self.failures.clear()
        return first

    def recover(self) -> None:
        """Hands the state back after any failure."""
        self.suspect = True
        self.sync()
        internals.forget_failure(self.model)

    def release(self) -> None:
        """Drops everything that is kept while steps run."""
        self.throttle.leave(self)
        self._variables, self._bindings, self._fallback = [], [], []
        self._epoch_start, self._spoiled, self.cause = [], None, None

    def _way_back(self, values: Values, donate: bool) -> Values | None:
        if not donate:
            return [list(group) for group in values]
        if not self._epoch_start:
            copy = epoch_copy.copied(values, self.model, self.layout)
            self._epoch_start.append(copy)
        return self._epoch_start[0]

    def _read(self, variable: keras.Variable, *_: Any, **__: Any) -> Any:
        if self.stepping:
            raise RuntimeError(
                f"Variable '{variable.path}' was read inside of a step that "
                "does not get it as part of its state. Expected: only the "
                "model's own variables, through `stateless_call` and similar "
                "methods."
            )
        self.sync()
        return internals.array_of(variable)


def _taken(binding: BindingInFit) -> Any:
    array = binding.refresh()
    if is_described(array):
        return array
    # A variable that has no value for all replicas refuses to give one.
    return (
        array if isinstance(binding, ShardedBinding) else binding.variable.value
    )


def _guarded_if_needed(plain: Any, guarding: Any) -> Callable[..., Any]:
    """Returns a function that runs the second program if it calls back."""
    chosen: list[Any] = []

    def call(*args: Any) -> Any:
        if not chosen:
            calls_back = has_callbacks(plain.trace(*args).jaxpr)
            chosen.append(guarding if calls_back else plain)
        return chosen[0](*args)

    return call


class FitStep:
    """One step of a model, on the state that `Running` keeps."""

    def __init__(
        self,
        running: Running,
        name: str,
        keep: Programs,
        donate: Programs | None = None,
        eager: bool = False,
    ) -> None:
        self._running = running
        self._name = name
        self._keep = keep
        self._donate = donate
        self._eager = eager
        self._throttle = Throttle() if eager else running.throttle
        # Eager operations run on this worker's devices only.
        self._is_local = eager and running.layout.is_global

    def __call__(self, state: object, data: object) -> tuple[Any, Any]:
        """Runs one step, as Keras' trainer calls it."""
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
        except BaseException as error:
            running.suspect, running.cause = True, error
            raise
        finally:
            running.stepping = False
        return outputs, state

    def _run(self, data: object, donating: bool) -> Any:
        running, throttle = self._running, self._throttle
        last, layout = running.last, running.layout
        programs = self._donate if donating else self._keep
        assert programs is not None
        is_sharded, rows = False, None
        if self._eager:
            data = layout.put_whole(data)
        else:
            is_sharded, data, rows = layout.put_batch(data)
        call = programs.sharded if is_sharded else programs.replicated
        with throttle.lock:
            throttle.drain(running)
            if running.failures:
                running.raise_failure()
            throttle.record(f"a batch in `{self._name}`")
            values = last[-1][1]
            if donating:
                throttle.dispatch(
                    running, last, any_of, call, values, data, rows
                )
                outputs = last[-1][0]
            else:
                given = values
                if self._is_local:
                    given = [list(map(layout.to_local, g)) for g in values]
                kept: list[Any] = []
                throttle.dispatch(
                    running, kept, any_of, call, given, data, rows
                )
                outputs, changes = kept[0]
                for group, changed in zip(values, changes, strict=True):
                    for index, value in changed.items():
                        if self._is_local:
                            value = layout.to_global(layout.place(value))
                        group[index] = value
        if layout.is_global:
            outputs = jax.tree.map(layout.result, outputs)
        return outputs


def all_values(step: StepFn) -> StepFn:
    """Makes a step return a new value for each variable."""

    def of_group(new: list[Any], old: list[Any]) -> Any:
        return [*map(like, new, old)]

    return _giving(step, of_group)


def changed_values(step: StepFn) -> StepFn:
    """Makes a step return new values only for variables that it changed."""
    # Values that are merely passed through need no second buffer.

    def of_group(new: list[Any], old: list[Any]) -> Any:
        pairs = enumerate(zip(new, old, strict=True))
        return {i: like(n, o) for i, (n, o) in pairs if n is not o}

    return _giving(step, of_group)


def _giving(step: StepFn, of_group: Callable[..., Any]) -> StepFn:
    def run(values: Any, data: Any) -> tuple[Any, Any]:
        outputs, new = step(tuple(list(group) for group in values), data)
        new = groups_like(new, values)
        return outputs, [*map(of_group, new, values)]

    run.__name__ = step.__name__  # profiles show it
    return run


def groups_like(new: Any, old: Any) -> list[list[Any]]:
    """Checks a new state's lengths, and converts its groups to lists."""
    groups = [list(group) for group in new]
    got, expected = [len(g) for g in groups], [len(g) for g in old]
    if got != expected:
        raise ValueError(
            "A step returned a state with a different number of values than "
            f"it was given.\nReceived: groups of {got} values. Expected: "
            f"{expected}. Return a value for each variable, even if it did "
            "not change."
        )
    return groups


def like(new: Any, old: Any) -> Any:
    """Casts `new` to the dtype of `old`, to avoid a second compilation."""
    if jnp.shape(new) != old.shape:
        raise ValueError(
            "A step returned a value whose shape is not that of its "
            f"variable. Received: {jnp.shape(new)}. Expected: {old.shape}."
        )
    weak = getattr(new, "weak_type", True)
    if not weak and new.dtype == old.dtype:
        return new
    return jax.lax.convert_element_type(jnp.asarray(new), old.dtype)
