"""Two copies of a model, their runs, and the results of these."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_dist.fit import own_code
from keras_dist.internals import keras_data
from keras_dist.internals import keras_internals
from keras_dist.internals.keras_optimizers import trainable_variables
from keras_dist.internals.keras_saveables import all_optimizers
from keras_dist.internals.keras_saveables import all_variables
from keras_dist.internals.keras_saveables import metric_variables
from keras_dist.plugin.backend import get_backend
from keras_dist.plugin.draws import Draw
from keras_dist.plugin.draws import drawn_by
from keras_dist.plugin.randomness import random_state
from keras_dist.plugin.randomness import set_random_state
from keras_dist.replica.strategy_core import StrategyBase
from keras_dist.verification import copies
from keras_dist.verification.batches import Batch
from keras_dist.verification.draws import drawer_of

_SLOT = "gradient"
_KEPT = ("state", "weight", "slot")

# A kind of `Difference`, and a name.
Key = tuple[str, str]


@dataclass(frozen=True)
class RecordedStep:
    """The results of one step."""

    phase: str
    index: int
    rows: int
    values: dict[Key, Any]  # arrays, in the order in which they are computed
    before: dict[Key, Any]  # variables' values before training


class Recorder(keras.optimizers.Optimizer):
    """An optimizer that only records the last gradient of each variable."""

    # Each part of a slot depends on the same part of a gradient only.
    is_elementwise = True

    def __init__(self, learning_rate: float = 0.0, **kwargs: Any) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.gradients: list[Any] = []

    def build(self, variables: object) -> None:
        """Makes a slot for the gradient of each variable."""
        if self.built:
            return
        super().build(variables)
        self.gradients = self.add_optimizer_variables(variables, _SLOT)

    def update_step(
        self, gradient: object, variable: keras.Variable, learning_rate: object
    ) -> None:
        slot = self.gradients[self._get_variable_index(variable)]
        # Sparse gradients, rows of an embedding, can be added but not assigned.
        self.assign(slot, ops.multiply(slot, 0.0))
        self.assign_add(slot, ops.cast(gradient, slot.dtype))


def compile_again(model: keras.Model) -> None:
    """Drops a model's compiled functions, which are made anew when needed."""
    model.train_function = None
    model.test_function = None
    model.predict_function = None


def _scaled_like(optimizer: keras.Optimizer, recorder: Recorder) -> Any:
    """Returns the recorder with the loss scaling of another optimizer."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        recorder.loss_scale_factor = optimizer.loss_scale_factor
        return recorder
    return keras.optimizers.LossScaleOptimizer(
        recorder, initial_scale=optimizer.initial_scale
    )


class Copy:
    """A copy of a model that can start again from the same state."""

    def __init__(
        self, make: Callable[[], keras.Model], scope: Callable[[], Any]
    ) -> None:
        self._scope = scope
        with scope():
            self.model = make()
        self.names: dict[int, str] = {}
        # Whether a step has drawn random numbers.
        self._draws = False

    def build(self, batch: Batch) -> None:
        """Makes variables that need a batch: those of layers, then slots."""
        if _is_built(self.model):
            self._build_optimizer()
        if not _is_built(self.model) or not all(
            optimizer.built for optimizer in all_optimizers(self.model).values()
        ):
            self._fit(batch)
            compile_again(self.model)

    def begin(
        self, values: Sequence[Any], names: Sequence[str], state: str
    ) -> None:
        """Sets the state to start from, in the order of `all_variables`."""
        variables = all_variables(self.model)
        self.initial = list(zip(variables, values, strict=True))
        self.names = dict(zip(map(id, variables), names, strict=True))
        self._random = state

    def predict(self, batch: Batch, index: int) -> RecordedStep:
        self._reset()
        values: dict[Key, Any] = {}
        given = batch.arguments(trains=False)
        given = {k: v for k, v in given.items() if k in ("x", "batch_size")}
        outputs = self.model.predict(verbose=0, **given)
        for number, leaf in enumerate(keras.tree.flatten(outputs)):
            values["prediction", f"output {number}"] = np.asarray(leaf)
        return RecordedStep("predict", index, batch.rows, values, {})

    def evaluate(self, batch: Batch, index: int) -> RecordedStep:
        self._reset()
        with self._drawing(batch):
            logs = self.model.evaluate(
                verbose=0, return_dict=True, **batch.arguments(trains=False)
            )
        return RecordedStep("evaluate", index, batch.rows, _of_logs(logs), {})

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Has recorders in place of the copy's optimizers."""
        model = self.model
        # A step gets at others in a way of its own, and trains with them.
        optimizers = {
            name: value
            for name, value in vars(model).items()
            if isinstance(value, keras.optimizers.Optimizer)
        }
        try:
            with self._scope():
                made = {
                    id(optimizer): Recorder()
                    for optimizer in optimizers.values()
                }
                self._recorders = list(made.values())
                for name, optimizer in optimizers.items():
                    setattr(
                        model,
                        name,
                        _scaled_like(optimizer, made[id(optimizer)]),
                    )
            self._build_optimizer()
            compile_again(model)
            yield
        finally:
            for name, optimizer in optimizers.items():
                setattr(model, name, optimizer)
            compile_again(model)

    def gradients(self, batch: Batch, index: int) -> RecordedStep:
        """Returns losses, metrics, gradients and states of a first step."""
        self._reset()
        values = _of_logs(self._fit(batch))
        for recorder in self._recorders:
            pairs = zip(
                trainable_variables(recorder), recorder.gradients, strict=True
            )
            for variable, slot in pairs:
                name = self.names[id(variable)]
                values["gradient", name] = ops.convert_to_numpy(slot)
        return self._recorded("gradients", index, batch.rows, values, ["state"])

    def train(self, batches: Sequence[Batch]) -> list[RecordedStep]:
        """Returns losses, metrics and all variables after each step."""
        self._reset()
        return [
            self._recorded(
                "training", index, batch.rows, _of_logs(self._fit(batch)), _KEPT
            )
            for index, batch in enumerate(batches)
        ]

    def fit(self, batches: Sequence[Batch]) -> RecordedStep:
        """Returns all variables after one `fit` of several batches."""
        self._reset()
        data = keras_data.Batches([batch.element for batch in batches])
        self.model.fit(data, shuffle=False, verbose=0)
        last = len(batches) - 1
        return self._recorded("fit", last, batches[last].rows, {}, _KEPT)

    def _build_optimizer(self) -> None:
        """Makes the slots that `fit` would make."""
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            with self._scope():
                optimizer.build(self.model.trainable_variables)

    def _fit(self, batch: Batch) -> dict[str, Any]:
        with self._drawing(batch):
            history = self.model.fit(
                epochs=1,
                shuffle=False,
                verbose=0,
                **batch.arguments(trains=True),
            )
        return {name: values[-1] for name, values in history.history.items()}

    @contextlib.contextmanager
    def _drawing(self, batch: Batch) -> Iterator[None]:
        """Has rows draw what they draw in their own batch, on one device."""
        if batch.index is None:
            with drawn_by(self._noted):
                yield
        elif self._draws:
            compile_again(self.model)
            with drawn_by(drawer_of(batch.index)):
                yield
            compile_again(self.model)
        else:
            yield

    def _noted(self, draw: Draw) -> Any:
        self._draws = True
        return draw.again()

    def _reset(self) -> None:
        for variable, value in self.initial:
            variable.assign(value)
        set_random_state(get_backend(), self._random)

    def _recorded(
        self,
        phase: str,
        index: int,
        rows: int,
        values: dict[Key, Any],
        kinds: Sequence[str],
    ) -> RecordedStep:
        """Adds the values of variables of some kinds to what was found."""
        of = copies.kinds_of(self.model)

        def key(variable: keras.Variable) -> Key:
            name = self.names.get(id(variable), variable.path)
            return of[id(variable)], name

        variables = all_variables(self.model)
        for kind in kinds:
            chosen = [v for v in variables if of.get(id(v)) == kind]
            for variable, value in zip(
                chosen, copies.values_of(chosen), strict=True
            ):
                values[key(variable)] = value
        before = {key(v): value for v, value in self.initial if id(v) in of}
        return RecordedStep(phase, index, rows, values, before)


def _is_built(model: keras.Model) -> bool:
    return all(layer.built for layer in model._flatten_layers())


def _of_logs(logs: dict[str, Any]) -> dict[Key, Any]:
    """Returns logs by kind and name: outputs' losses, their sum, metrics."""
    losses = [name for name in logs if name.endswith("_loss")]
    losses += ["loss"] if "loss" in logs else []
    metrics = [name for name in logs if name not in losses]
    return {
        **{("loss", name): np.asarray(logs[name]) for name in losses},
        **{("metric", name): np.asarray(logs[name]) for name in metrics},
    }


def copies_of(
    strategy: StrategyBase, model: keras.Model, batch: Batch
) -> tuple[Copy, Copy]:
    """Makes copies on one device and under the strategy that start alike."""
    make, backend = copies.maker_of(model), get_backend()
    made = []
    state = random_state(backend)
    for scope in (contextlib.nullcontext, strategy.scope):
        # Both copies get the same names and the same random numbers.
        keras_internals.set_name_counts({})
        set_random_state(backend, state)
        copy = Copy(make, scope)
        own_code.found_equal(copy.model)  # the report tells what is not
        copy.build(batch)
        made.append(copy)
    reference, other = made
    given, users = all_variables(reference.model), {}
    copies.check_alike(
        given,
        all_variables(other.model),
        "the same variables each time the model is made",
    )
    if isinstance(model, keras.Model) and model.built:
        copies.check_alike(
            reference.model.weights, model.weights, copies.INSTEAD
        )
        users = _of_user(reference.model, model)
    # The user's model has the state and the names, if it has the variable.
    sources = [users.get(id(v), v) for v in given]
    values, names = copies.values_of(sources), [v.path for v in sources]
    state = random_state(backend)
    for copy in made:
        copy.begin(values, names, state)
    return reference, other


def _of_user(copy: keras.Model, model: keras.Model) -> dict[int, Any]:
    """Maps the id of each variable of the copy to the user's variable."""
    pairs = [(_of_layers(copy), _of_layers(model))]
    optimizers = all_optimizers(model)
    for name, optimizer in all_optimizers(copy).items():
        if name in optimizers and optimizers[name].built:
            pairs.append((optimizer.variables, optimizers[name].variables))
    return {
        id(variable): other
        for variables, others in pairs
        if len(variables) == len(others)
        for variable, other in zip(variables, others, strict=True)
        if tuple(variable.shape) == tuple(other.shape)
    }


def _of_layers(model: keras.Model) -> list[keras.Variable]:
    """Returns weights and states of seed generators, but not of metrics."""
    metrics = metric_variables(model)
    return [v for v in model.variables if id(v) not in metrics]
