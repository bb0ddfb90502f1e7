"""Runs of one copy of a model, and their results."""

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_dist.plugin.randomness import set_random_state
from keras_dist.verification.batches import Batch
from keras_dist.verification.copies import Kinds
from keras_dist.verification.copies import kinds_of
from keras_dist.verification.copies import optimizers_of
from keras_dist.verification.copies import set_values
from keras_dist.verification.copies import values_of
from keras_dist.verification.copies import variables_of
from keras_dist.verification.recorder import Recorders
from keras_dist.verification.recorder import compile_again

# A kind of `Difference`, and a name.
Key = tuple[str, str]


@dataclass(frozen=True)
class RecordedStep:
    """The results of one step.

    Args:
        phase: As in `Difference`.
        index: Number of the batch.
        rows: Rows of the batch.
        found: Arrays by kind and name, in the order in which they are computed.
        before: Values of variables before training, by kind and name.
    """

    phase: str
    index: int
    rows: int
    found: dict[Key, Any]
    before: dict[Key, Any]


class Copy:
    """A copy of a model that can start again from the same state.

    `make` makes the model, in the context manager that `scope` returns.
    `backend` knows the framework's random state.
    """

    def __init__(
        self,
        make: Callable[[], keras.Model],
        scope: Callable[[], Any],
        backend: Any,
    ) -> None:
        self._scope = scope
        self._backend = backend
        with scope():
            self.model = make()
        self.names: dict[int, str] = {}

    def build(self, batch: Batch) -> None:
        """Makes variables that need a batch: those of layers, then slots."""
        if _is_built(self.model):
            self._build_optimizer()
        if not _is_built(self.model) or not all(
            each.built for each in optimizers_of(self.model).values()
        ):
            self._fit(batch)
            compile_again(self.model)

    def begin(
        self, values: Sequence[Any], names: Sequence[str], state: str
    ) -> None:
        """Sets the state that each phase starts from.

        `values` and `names` are in the order of `variables_of` this copy;
        `state` comes from `random_state`.
        """
        variables = variables_of(self.model)
        set_values(variables, values)
        self.initial = list(zip(variables, values, strict=True))
        self.names = {
            id(variable): name
            for variable, name in zip(variables, names, strict=True)
        }
        self._random = state

    def predict(self, batch: Batch, index: int) -> RecordedStep:
        """Returns predictions."""
        self._reset()
        found: dict[Key, Any] = {}
        given = batch.arguments(trains=False)
        given = {k: v for k, v in given.items() if k in ("x", "batch_size")}
        outputs = self.model.predict(verbose=0, **given)
        for number, leaf in enumerate(keras.tree.flatten(outputs)):
            found["prediction", f"output {number}"] = np.asarray(leaf)
        return RecordedStep("predict", index, batch.rows, found, {})

    def evaluate(self, batch: Batch, index: int) -> RecordedStep:
        """Returns losses and metrics, without training."""
        self._reset()
        logs = self.model.evaluate(
            verbose=0, return_dict=True, **batch.arguments(trains=False)
        )
        return RecordedStep("evaluate", index, batch.rows, _of_logs(logs), {})

    def recorders(self) -> Recorders:
        """Puts recorders in place of the copy's optimizers."""
        with self._scope():
            recorders = Recorders(self.model)
        self._build_optimizer()
        return recorders

    def gradients(
        self, batch: Batch, index: int, recorders: Recorders
    ) -> RecordedStep:
        """Returns losses, metrics, gradients and states of a first step."""
        self._reset()
        logs = self._fit(batch)
        found = _of_logs(logs)
        for key, gradient in recorders.gradients().items():
            found["gradient", self.names[key]] = gradient
        found |= self._variables(("state",))
        return RecordedStep(
            "gradients", index, batch.rows, found, self._before()
        )

    def train(self, batches: Sequence[Batch]) -> list[RecordedStep]:
        """Returns losses, metrics and all variables after each step."""
        self._reset()
        steps = []
        for index, batch in enumerate(batches):
            found = _of_logs(self._fit(batch))
            found |= self._variables(("state", "weight", "slot"))
            steps.append(
                RecordedStep(
                    "training", index, batch.rows, found, self._before()
                )
            )
        return steps

    def _build_optimizer(self) -> None:
        """Makes the slots that `fit` would make."""
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            with self._scope():
                optimizer.build(self.model.trainable_variables)

    def _fit(self, batch: Batch) -> dict[str, Any]:
        history = self.model.fit(
            epochs=1, shuffle=False, verbose=0, **batch.arguments(trains=True)
        )
        return {name: values[-1] for name, values in history.history.items()}

    def _reset(self) -> None:
        for variable, value in self.initial:
            variable.assign(value)
        set_random_state(self._backend, self._random)

    def _variables(self, kinds: Sequence[str]) -> dict[Key, Any]:
        of: Kinds = kinds_of(self.model)
        known = [v for v in variables_of(self.model) if id(v) in of]
        chosen = [v for v in known if of[id(v)] in kinds]
        ordered = sorted(chosen, key=lambda v: kinds.index(of[id(v)]))
        return {
            self._key(v, of): value
            for v, value in zip(ordered, values_of(ordered), strict=True)
        }

    def _before(self) -> dict[Key, Any]:
        of = kinds_of(self.model)
        return {
            self._key(v, of): value for v, value in self.initial if id(v) in of
        }

    def _key(self, variable: keras.Variable, of: Kinds) -> Key:
        return of[id(variable)], self.names.get(id(variable), variable.path)


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
